#include "os/trace_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/trace.h"
#include "support/temp_directory.h"
#include "trunkline/trace.h"

namespace trunkline {
namespace {

constexpr trace::Kind kCommit{"commit", trace::Category::checkpoint};

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

std::size_t files_in(const test::TempDirectory& directory) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    count += entry.exists() ? 1 : 0;
  return count;
}

TEST(TraceFile, IsWrittenAtTheEndAndReplacesWhatWasThere) {
  const test::TempDirectory directory;
  const std::string path = directory.file("trace.json");
  std::ofstream(path) << "old";
  ASSERT_TRUE(start_trace(path));
  {
    const trace::Span span(kCommit);
  }
  EXPECT_EQ(std::filesystem::file_size(path), 3U);
  const auto summary = stop_trace();
  ASSERT_TRUE(summary) << summary.error().message;
  EXPECT_EQ(summary->path, path);
  EXPECT_EQ(summary->events, 1U);
  EXPECT_EQ(read_json(path)["otherData"]["events"], 1);
  EXPECT_EQ(files_in(directory), 1U);
}

TEST(TraceFile, OneIsRecordedAtATimeAndTheErrorNamesIt) {
  const test::TempDirectory directory;
  ASSERT_TRUE(start_trace(directory.file("one.json")));
  const auto second = start_trace(directory.file("two.json"));
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().message.find("one.json is being recorded"), std::string::npos)
      << second.error().message;
  EXPECT_TRUE(stop_trace());
  EXPECT_FALSE(stop_trace());
  EXPECT_EQ(files_in(directory), 1U);
}

TEST(TraceFile, APlaceThatCannotBeWrittenIsReportedAtTheStart) {
  const test::TempDirectory directory;
  EXPECT_FALSE(start_trace(directory.file("missing/trace.json")));
  EXPECT_FALSE(start_trace(directory.path()));
  EXPECT_FALSE(start_trace(""));
  EXPECT_FALSE(trace::is_on());
}

TEST(TraceFile, ARelativePathIsOfTheDirectoryAtTheStart) {
  const test::TempDirectory directory;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(directory.path());
  const Status started = start_trace("trace.json");
  std::filesystem::current_path(before);
  ASSERT_TRUE(started) << started.error().message;
  const auto summary = stop_trace();
  ASSERT_TRUE(summary) << summary.error().message;
  EXPECT_TRUE(std::filesystem::exists(directory.file("trace.json")));
}

TEST(TraceFile, AForkedChildRecordsNothingAndMayRecordAnother) {
  const test::TempDirectory directory;
  ASSERT_TRUE(start_trace(directory.file("parent.json")));
  {
    const trace::Span span(kCommit);
  }
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    bool is_good = !trace::is_on() && !stop_trace();
    is_good = is_good && start_trace(directory.file("child.json"));
    {
      const trace::Span span(kCommit);
    }
    const auto summary = stop_trace();
    ::_exit(is_good && summary && summary->events == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const auto summary = stop_trace();
  ASSERT_TRUE(summary) << summary.error().message;
  EXPECT_EQ(summary->events, 1U);
}

// In a process of its own, which begins from nothing.
int run_with_variable(const std::string& value) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("TRUNKLINE_TRACE", value.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
    os::start_trace_from_environment();
    os::start_trace_from_environment();
    {
      const trace::Span span(kCommit);
    }
    os::finish_trace_from_environment();
    os::finish_trace_from_environment();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status == 0 ? child : -1;
}

TEST(TraceFile, TheEnvironmentNamesOneForTheWholeProcess) {
  const test::TempDirectory directory;
  const int child = run_with_variable(directory.file("trace-%p.json"));
  ASSERT_GT(child, 0);
  const std::string path = directory.file("trace-" + std::to_string(child) + ".json");
  EXPECT_EQ(read_json(path)["otherData"]["events"], 1);
  ASSERT_GT(run_with_variable(directory.file("missing/trace.json")), 0);  // only reported
}

}  // namespace
}  // namespace trunkline
