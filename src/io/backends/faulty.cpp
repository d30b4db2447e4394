#include "io/backends/faulty.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace trunkline {

std::shared_ptr<Faults> Faults::create() { return std::make_shared<io::FaultPlan>(); }

}  // namespace trunkline

namespace trunkline::io {
namespace {

// Direct commands can only be cut at multiples of this.
constexpr std::uint64_t kDirectUnit = 4096;
constexpr int kPoison = 0xDB;

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {
    plan_->add_sleeper(this);
  }
  FaultyBackend(const FaultyBackend&) = delete;
  FaultyBackend& operator=(const FaultyBackend&) = delete;
  ~FaultyBackend() override { plan_->remove_sleeper(this); }

  std::vector<std::string> features() const override { return inner_->features(); }

  void push(const Command& command) override {
    const Fault fault = plan_->next(command);
    sent_[command.tag] = {command, fault};
    if (const auto changed = under_fault(command, fault))
      inner_->push(*changed);
    else
      arrived_.push_back({command.tag, 0});
  }

  void reap(std::vector<Completion>& completions, unsigned wanted) override {
    // The inner backend must not be waited for while one of our own completions is ready.
    if (!deliver(completions)) {
      inner_->reap(arrived_, wanted);
      deliver(completions);
    }
  }

  void wake() override { inner_->wake(); }

  Status register_memory(std::span<std::byte> memory) override { return inner_->register_memory(memory); }

 private:
  // Passes on what has arrived and is not held, shuffled if the plan requires. Returns whether there was any.
  bool deliver(std::vector<Completion>& completions) {
    const std::size_t before = completions.size();
    std::vector<Completion> kept;
    for (const Completion& completion : arrived_) {
      const auto& [command, fault] = sent_.at(completion.tag);
      if (fault.hold && plan_->holding()) {
        kept.push_back(completion);
        continue;
      }
      completions.push_back({completion.tag, result_under_fault(command, fault, completion.result)});
    }
    arrived_ = std::move(kept);
    for (std::size_t left = completions.size(); left > before + 1; --left) {
      if (const auto other = plan_->shuffle(left - before))
        std::swap(completions[left - 1], completions[before + *other]);
    }
    return completions.size() != before;
  }

  std::unique_ptr<Backend> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::unordered_map<std::uint32_t, std::pair<Command, Fault>> sent_;  // by tag
  std::vector<Completion> arrived_;  // results of the inner backend, or none (0)
};

}  // namespace

std::optional<Command> under_fault(Command command, const Fault& fault) {
  if (fault.code != 0) return std::nullopt;
  if (fault.bytes && command.op == Op::write) {
    if (*fault.bytes == 0) return std::nullopt;
    std::uint64_t length = std::min(command.length, *fault.bytes);
    if (command.direct) length -= length % kDirectUnit;
    // Too short for a direct write: everything is written, but less is reported.
    if (length > 0) command.length = length;
  }
  return command;
}

std::int64_t result_under_fault(const Command& command, const Fault& fault, std::int64_t result) {
  if (fault.code != 0) return -fault.code;
  if (!fault.bytes || command.op == Op::sync) return result;
  const auto limit = static_cast<std::int64_t>(*fault.bytes);
  if (result <= limit) return result;
  if (command.op == Op::read) {
    std::memset(command.data + limit, kPoison, static_cast<std::size_t>(result - limit));
  }
  return limit;
}

void FaultPlan::add(const Rule& rule) {
  const std::scoped_lock lock(mutex_);
  rules_.push_back(rule);
  if (rule.fault.hold) holding_ = true;
}

void FaultPlan::fail(Op op, std::uint64_t first, int code, std::uint64_t count) {
  add({op, first, count, {.code = code, .bytes = {}, .hold = false}});
}

void FaultPlan::shorten(Op op, std::uint64_t first, std::uint64_t bytes, std::uint64_t count) {
  add({op, first, count, {.code = 0, .bytes = bytes, .hold = false}});
}

void FaultPlan::hold(Op op, std::uint64_t first, std::uint64_t count) {
  add({op, first, count, {.code = 0, .bytes = {}, .hold = true}});
}

void FaultPlan::release() {
  const std::scoped_lock lock(mutex_);
  holding_ = false;
  std::erase_if(rules_, [](const Rule& rule) { return rule.fault.hold; });
  released_.notify_all();
  for (Backend* backend : sleepers_) backend->wake();
}

void FaultPlan::disturb(std::uint64_t seed, double interrupt_rate, double short_rate) {
  const std::scoped_lock lock(mutex_);
  random_.seed(seed);
  interrupt_rate_ = interrupt_rate;
  short_rate_ = short_rate;
  disturbing_ = true;
}

std::uint64_t FaultPlan::commands(Op op) const {
  const std::scoped_lock lock(mutex_);
  return commands_[static_cast<std::size_t>(op)];
}

std::uint64_t FaultPlan::injected() const {
  const std::scoped_lock lock(mutex_);
  return injected_;
}

Fault FaultPlan::next(const Command& command) {
  const std::scoped_lock lock(mutex_);
  const std::uint64_t number = commands_[static_cast<std::size_t>(command.op)]++;
  Fault fault;
  for (const Rule& rule : rules_) {
    if (rule.op != command.op || number < rule.first || number - rule.first >= rule.count) continue;
    if (rule.fault.code != 0) fault.code = rule.fault.code;
    if (rule.fault.bytes) fault.bytes = rule.fault.bytes;
    fault.hold = fault.hold || rule.fault.hold;
  }
  if (disturbing_ && command.op != Op::sync) {
    std::uniform_real_distribution<double> chance(0, 1);
    if (chance(random_) < interrupt_rate_) {
      fault.code = random_() % 2 == 0 ? EINTR : EAGAIN;
    } else if (chance(random_) < short_rate_ && command.length > 1) {
      fault.bytes = 1 + random_() % (command.length - 1);
    }
  }
  injected_ += fault.code != 0 || fault.bytes || fault.hold ? 1 : 0;
  return fault;
}

void FaultPlan::wait_released() {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [this] { return !holding_.load(); });
}

std::optional<std::uint64_t> FaultPlan::shuffle(std::uint64_t bound) {
  const std::scoped_lock lock(mutex_);
  if (!disturbing_) return std::nullopt;
  return random_() % bound;
}

std::unique_ptr<Backend> FaultPlan::decorate(std::unique_ptr<Backend> inner) {
  return std::make_unique<FaultyBackend>(std::move(inner), shared_from_this());
}

void FaultPlan::add_sleeper(Backend* backend) {
  const std::scoped_lock lock(mutex_);
  sleepers_.push_back(backend);
}

void FaultPlan::remove_sleeper(Backend* backend) {
  const std::scoped_lock lock(mutex_);
  std::erase(sleepers_, backend);
}

}  // namespace trunkline::io
