// A test's own directory, removed with all its contents.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace trunkline::test {

class TempDirectory {
 public:
  // Under TRUNKLINE_TEST_DIR, else /var/tmp: a real filesystem, whereas /tmp may be in memory.
  TempDirectory() : TempDirectory(default_root()) {}
  explicit TempDirectory(const std::string& root) {
    path_ = root + "/trunkline-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("cannot create " + path_);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  static std::string default_root() {
    const char* root = std::getenv("TRUNKLINE_TEST_DIR");
    return root != nullptr ? root : "/var/tmp";
  }

  std::string path_;
};

}  // namespace trunkline::test
