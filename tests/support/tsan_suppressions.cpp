// Suppressions for the thread sanitizer, compiled in so that every test program has them.
//
// liburing maps and unmaps rings by raw system calls, which the sanitizer does not intercept: when a ring is
// set up at the address of one that was unmapped, it mistakes the new owner's first access for a race with
// the old one's last.
extern "C" const char* __tsan_default_suppressions();   // NOLINT(*-reserved-identifier): the sanitizer's name
extern "C" const char* __tsan_default_suppressions() {  // NOLINT(*-reserved-identifier)
  return "race:io_uring_smp_store_release\n"
         "race:io_uring_cq_advance\n"
         "race:_io_uring_get_sqe\n"
         "race:_io_uring_get_cqe\n"
         "race:io_uring_queue_init\n"
         "race:io_uring_prep_rw\n"
         "race:io_uring_sqe_set_data64\n"
         "race:io_uring_setup\n";
}
