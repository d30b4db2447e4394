// Lets wheels run where libstdc++ is that of GCC 11 (RHEL 9 and its relatives, manylinux_2_34).
//
// GCC 12 declared this function noexcept and gave it a new symbol version, GLIBCXX_3.4.30, the only one of
// that version here. What it does has not changed, so it is defined in the module, word for word as in
// libstdc++ (src/c++11/condition_variable.cc), and the library's is not needed. Only wheels contain this
// file.
#include <condition_variable>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 12
void std::condition_variable::wait(std::unique_lock<std::mutex>& lock) noexcept {
  _M_cond.wait(*lock.mutex());
}
#endif
