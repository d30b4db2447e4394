#include "tuning/tuning_table.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "os/durable.h"
#include "os/machine_id.h"
#include "tuning/storage.h"
#include "tuning/tuning_store.h"

namespace trunkline::tuning {
namespace {

// The device number of the filesystem of `path`, or of the directory that would hold it.
std::optional<dev_t> device_of(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) return status.st_dev;
  if (::stat(os::directory_of(path).c_str(), &status) == 0) return status.st_dev;
  return std::nullopt;
}

}  // namespace

TuningTable::TuningTable(std::vector<Tuning> tunings, std::string problem)
    : tunings_(std::move(tunings)), problem_(std::move(problem)) {}

std::shared_ptr<const TuningTable> TuningTable::load() {
  const auto none = [](std::string why) {
    return std::make_shared<const TuningTable>(std::vector<Tuning>{}, std::move(why));
  };
  if (is_off()) return none("TRUNKLINE_TUNING is \"off\"");
  const auto file = default_file();
  if (!file) return none("");
  auto loaded = tuning::load(*file);
  if (!loaded) {
    log::warn(log::Component::engine, "saved settings are ignored: {}", loaded.error().message);
    return none(loaded.error().message);
  }
  if (loaded->empty()) return none("");
  const std::string machine = os::machine_id();
  const std::size_t foreign =
      std::erase_if(*loaded, [&](const Tuning& each) { return each.machine != machine; });
  std::string problem;
  if (loaded->empty()) problem = fmt::format("{} holds saved settings of other machines only", *file);
  if (foreign > 0)
    log::debug(log::Component::engine, "{}: saved settings of other machines: {}", *file, foreign);
  return std::make_shared<const TuningTable>(std::move(*loaded), std::move(problem));
}

const Storage* TuningTable::storage_of(dev_t device, const std::string& path) const {
  const auto shown = [](const std::optional<Storage>& known) { return known ? &known.value() : nullptr; };
  {
    const std::scoped_lock lock(mutex_);
    if (const auto known = storages_.find(device); known != storages_.end()) return shown(known->second);
  }
  std::optional<Storage> found;  // without the lock: a file server may not answer
  if (auto storage = tuning::storage_of(path))
    found = std::move(*storage);
  else
    log::info(log::Component::engine, "saved settings are ignored for {}: {}", path, storage.error().message);
  const std::scoped_lock lock(mutex_);
  return shown(storages_.try_emplace(device, std::move(found)).first->second);  // nothing is ever removed
}

const Tuning* TuningTable::find(std::span<const std::string> paths) const {
  if (tunings_.empty() || paths.empty()) return nullptr;
  std::vector<Storage> storages;
  for (const std::string& path : paths) {
    const auto device = device_of(path);
    if (!device) {
      log::warn(log::Component::engine,
                "saved settings are not used: neither {} nor the directory that it would be in exists", path);
      return nullptr;
    }
    const Storage* const storage = storage_of(*device, path);
    if (storage == nullptr) return nullptr;
    storages.push_back(*storage);
  }
  return find_storages(std::move(storages));
}

const Tuning* TuningTable::find_open(int fd, const std::string& path) const {
  struct stat status{};
  if (tunings_.empty() || ::fstat(fd, &status) != 0) return nullptr;
  const Storage* const storage = storage_of(status.st_dev, path);
  return storage != nullptr ? find_storages({*storage}) : nullptr;
}

const Tuning* TuningTable::find_storages(std::vector<Storage> storages) const {
  std::ranges::sort(storages);
  const auto rest = std::ranges::unique(storages);
  storages.erase(rest.begin(), rest.end());
  const auto found = std::ranges::find(tunings_, storages, &Tuning::storages);
  return found == tunings_.end() ? nullptr : &*found;
}

const Tuning* TuningTable::find_shared(const std::string& path) const {
  const auto device = tunings_.empty() ? std::nullopt : device_of(path);
  const Storage* const storage = device ? storage_of(*device, path) : nullptr;
  if (storage == nullptr) return nullptr;
  const auto found = std::ranges::find_if(tunings_, [storage](const Tuning& each) {
    return each.storages.size() > 1 && std::ranges::find(each.storages, *storage) != each.storages.end();
  });
  return found == tunings_.end() ? nullptr : &*found;
}

Settings TuningTable::agreed() const {
  Settings agreed;
  if (tunings_.empty()) return agreed;
  const auto of_creation = [](const Settings& settings) {
    return Settings{
        .backend = settings.backend, .lanes = settings.lanes, .queue_depth = settings.queue_depth};
  };
  agreed = of_creation(tunings_.front().settings);
  for (const Tuning& each : tunings_) {
    if (of_creation(each.settings) != agreed) return {};
  }
  return agreed;
}

}  // namespace trunkline::tuning
