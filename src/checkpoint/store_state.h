// What a Store knows from one call to the next, and shares with the save that it has begun.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/continuation.h"
#include "checkpoint/directory_lock.h"
#include "checkpoint/directory_ops.h"
#include "checkpoint/listing.h"
#include "checkpoint/retention.h"
#include "checkpoint/store_descriptor.h"
#include "os/fork_takeover.h"

namespace trunkline::checkpoint {

class SaveTransaction;

struct StoreState {
  StoreState(std::string path, DirectoryOps operations)
      : directory(std::move(path)), ops(std::move(operations)) {}

  // Locks the mutex, as everybody does who uses what it guards. In a forked child it forgets the save of the
  // parent before.
  std::unique_lock<std::mutex> enter() {
    ownership.take_over([this] {
      save = nullptr;
      // It may be held forever by a thread that the child does not have.
      std::construct_at(&mutex);
    });
    return std::unique_lock(mutex);
  }

  // The steps of the directory, for a save that has locked it. Each save lists several times, since what
  // others do meanwhile must be noticed: without locks, or by hand, a step may come, go or be replaced at any
  // time, and then a commit must still get a higher number, and retention must not remove what it does not
  // know. So it is listed anew, but where the lock excludes others, folders that have not changed are not
  // read.
  Result<std::vector<StepEntry>> list(const DirectoryLock& lock) {
    return lock.excludes_every_writer() ? list_steps(directory, listing) : list_steps(directory);
  }

  const std::string directory;  // absolute
  const DirectoryOps ops;

  std::mutex mutex;  // guards what follows, and keeps the functions that change the directory apart
  StoreDescriptor descriptor;
  Continuation known;  // its id is that of the descriptor when it was last looked at
  RetentionMemory retention;
  ListingCache listing;
  std::optional<std::string> aside;       // where an earlier run went, until a save is committed
  const SaveTransaction* save = nullptr;  // that is under way, begun by this process
  os::ForkTakeover ownership;             // of the mutex and what it guards
};

}  // namespace trunkline::checkpoint
