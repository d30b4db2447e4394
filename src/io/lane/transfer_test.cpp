#include "io/lane/transfer.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "io/file/file_core.h"

namespace trunkline::io {
namespace {

class TransferTest : public testing::Test {
 protected:
  TransferTest() {
    member_.path = "/data/a.bin";
    member_.pair.limits = {.usable = true, .memory_alignment = 512, .offset_alignment = 512, .why = {}};
  }

  Transfer make(Op op, IoPath path, std::uint64_t offset, std::uint64_t length) {
    Transfer transfer;
    transfer.op = op;
    transfer.member = &member_;
    transfer.memory =
        reinterpret_cast<std::byte*>(4096);  // NOLINT(performance-no-int-to-ptr): never followed
    transfer.piece = {path, offset, length, offset, length};
    return transfer;
  }

  Member member_;
};

TEST_F(TransferTest, AFullResultFinishes) {
  Transfer transfer = make(Op::read, IoPath::direct, 0, 4096);
  EXPECT_EQ(advance(transfer, 4096).step, Outcome::Step::finished);
}

TEST_F(TransferTest, AnAlignedShortResultContinuesDirectly) {
  Transfer transfer = make(Op::write, IoPath::direct, 4096, 8192);
  const Outcome outcome = advance(transfer, 512);
  EXPECT_EQ(outcome.step, Outcome::Step::resubmit);
  EXPECT_TRUE(outcome.resumed);
  const Command rest = transfer.next_command();
  EXPECT_TRUE(rest.direct);
  EXPECT_EQ(rest.offset, 4608U);
  EXPECT_EQ(rest.length, 7680U);
  EXPECT_EQ(rest.data, transfer.memory + 512);
}

TEST_F(TransferTest, AnUnalignedShortResultContinuesThroughTheCache) {
  Transfer transfer = make(Op::read, IoPath::direct, 0, 4096);
  EXPECT_EQ(advance(transfer, 100).step, Outcome::Step::resubmit);
  const Command rest = transfer.next_command();
  EXPECT_FALSE(rest.direct);
  EXPECT_EQ(rest.offset, 100U);
  EXPECT_EQ(rest.length, 3996U);
}

TEST_F(TransferTest, ABouncedReadNeedsNoMoreThanItsPayload) {
  Transfer transfer = make(Op::read, IoPath::bounced, 100, 200);
  transfer.piece.span_offset = 0;
  transfer.piece.span_length = 512;
  EXPECT_EQ(transfer.needed(), 300U);
  EXPECT_EQ(advance(transfer, 300).step, Outcome::Step::finished);  // the file ends there
}

TEST_F(TransferTest, TheEndOfTheFileIsAnError) {
  Transfer transfer = make(Op::read, IoPath::buffered, 1000, 200);
  EXPECT_EQ(advance(transfer, 50).step, Outcome::Step::resubmit);
  const Outcome outcome = advance(transfer, 0);
  EXPECT_EQ(outcome.step, Outcome::Step::failed);
  EXPECT_EQ(outcome.error.kind, ErrorKind::end_of_file);
  EXPECT_NE(outcome.error.message.find("cannot read 200 bytes at 1000 of /data/a.bin: the file ends at 1050"),
            std::string::npos)
      << outcome.error.message;
}

TEST_F(TransferTest, AWriteOfNothingIsAnError) {
  Transfer transfer = make(Op::write, IoPath::buffered, 0, 10);
  const Outcome outcome = advance(transfer, 0);
  EXPECT_EQ(outcome.step, Outcome::Step::failed);
  EXPECT_EQ(outcome.error.code, EIO);
}

TEST_F(TransferTest, InterruptionsAreRetriedButNotForever) {
  for (const int code : {EINTR, EAGAIN}) {
    Transfer transfer = make(Op::write, IoPath::buffered, 0, 10);
    int retries = 0;
    Outcome outcome = advance(transfer, -code);
    while (outcome.step == Outcome::Step::resubmit && retries < 100000) {
      EXPECT_TRUE(outcome.retried);
      ++retries;
      outcome = advance(transfer, -code);
    }
    EXPECT_EQ(outcome.step, Outcome::Step::failed);
    EXPECT_EQ(outcome.error.code, code);
    EXPECT_GE(retries, 100);
  }
}

TEST_F(TransferTest, RejectedDirectIoFallsBackOnce) {
  Transfer transfer = make(Op::read, IoPath::direct, 0, 4096);
  const Outcome outcome = advance(transfer, -EINVAL);
  EXPECT_EQ(outcome.step, Outcome::Step::resubmit);
  EXPECT_TRUE(outcome.refused_direct);
  EXPECT_FALSE(transfer.next_command().direct);
  EXPECT_EQ(advance(transfer, -EINVAL).step, Outcome::Step::failed);
}

TEST_F(TransferTest, AResultBeyondTheRequestIsRejected) {
  Transfer transfer = make(Op::read, IoPath::buffered, 0, 10);
  EXPECT_EQ(advance(transfer, 11).step, Outcome::Step::failed);
}

TEST_F(TransferTest, ASystemErrorNamesOperationRangeAndFile) {
  Transfer transfer = make(Op::write, IoPath::direct, 4096, 8192);
  const Outcome outcome = advance(transfer, -ENOSPC);
  EXPECT_EQ(outcome.error.code, ENOSPC);
  EXPECT_EQ(outcome.error.path, "/data/a.bin");
  EXPECT_NE(outcome.error.message.find("cannot write 8192 bytes at 4096 of /data/a.bin: no space"),
            std::string::npos)
      << outcome.error.message;
}

}  // namespace
}  // namespace trunkline::io
