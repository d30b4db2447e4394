// Blocks signals while it lives. The library's threads are started meanwhile, so that they leave signals to
// the threads of the program that uses it.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace trunkline::os {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace trunkline::os
