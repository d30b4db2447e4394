#include <fmt/format.h>

#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "faults_object.h"
#include "gil.h"
#include "os/fork_generation.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

Op op_argument(nb::handle value) {
  if (!PyUnicode_Check(value.ptr())) raise_type_error("op: must be a str, not " + shown_type(value));
  if (nb::borrow(value).equal(nb::str("read"))) return Op::read;
  if (nb::borrow(value).equal(nb::str("write"))) return Op::write;
  if (nb::borrow(value).equal(nb::str("sync"))) return Op::sync;
  raise_value_error("op: must be \"read\", \"write\" or \"sync\"");
}

double rate_argument(double rate, const char* name) {
  if (!(rate >= 0 && rate < 1))
    raise_value_error(fmt::format("{}: must be at least 0 and less than 1", name));
  return rate;
}

}  // namespace

std::vector<FaultsObject::Entry>& FaultsObject::registry() {
  static auto* all = new std::vector<Entry>();
  return *all;
}

FaultsObject::FaultsObject() : faults(Faults::create()) {
  std::erase_if(registry(), [](const Entry& other) { return other.faults.expired(); });
  registry().push_back({.faults = faults, .generation = os::fork_generation()});
}

void FaultsObject::release_all() {
  for (const Entry& each : registry()) {
    if (each.generation != os::fork_generation()) continue;
    if (const std::shared_ptr<Faults> live = each.faults.lock()) live->release();
  }
}

void register_faults(nb::module_& module) {
  nb::class_<FaultsObject>(
      module, "Faults",
      "Faults to inject into an engine, Engine(faults=faults), for testing code that uses it.\n\n"
      "Commands (transfers and syncs, resumed and retried ones too) of each op, \"read\", \"write\" or "
      "\"sync\", are\n"
      "counted from 0 in the order in which they are sent; a rule names the commands first .. first + count "
      "- 1.\n"
      "Thread-safe.")
      .def(nb::init<>())
      .def(
          "fail",
          [](FaultsObject& self, nb::handle op, nb::handle first, int code, nb::handle count) {
            self.faults->fail(op_argument(op), count_argument(first, "first"), code,
                              count_argument(count, "count"));
          },
          "op"_a.none(), "first"_a.none(), "code"_a, "count"_a.none() = 1,
          nb::sig("def fail(self, op: typing.Literal['read', 'write', 'sync'], first: int, code: int, count: "
                  "int = 1) -> None"),
          "The commands fail with errno `code` and move nothing.")
      .def(
          "shorten",
          [](FaultsObject& self, nb::handle op, nb::handle first, nb::handle bytes, nb::handle count) {
            self.faults->shorten(op_argument(op), count_argument(first, "first"),
                                 size_argument(bytes, "nbytes"), count_argument(count, "count"));
          },
          "op"_a.none(), "first"_a.none(), "nbytes"_a.none(), "count"_a.none() = 1,
          nb::sig("def shorten(self, op: typing.Literal['read', 'write', 'sync'], first: int, nbytes: int | "
                  "str, count: int "
                  "= 1) -> None"),
          "The commands move at most `nbytes` bytes (0: a zero result, as at the end of a file).")
      .def(
          "hold",
          [](FaultsObject& self, nb::handle op, nb::handle first, nb::handle count) {
            self.faults->hold(op_argument(op), count_argument(first, "first"),
                              count_argument(count, "count"));
          },
          "op"_a.none(), "first"_a.none(), "count"_a.none() = 1,
          nb::sig("def hold(self, op: typing.Literal['read', 'write', 'sync'], first: int, count: int = 1) "
                  "-> None"),
          "The commands complete only after release(), or at the interpreter's exit.")
      .def(
          "release",
          [](FaultsObject& self) {
            const GilReleased unlocked;
            self.faults->release();
          },
          "Lets all held commands complete.")
      .def(
          "disturb",
          [](FaultsObject& self, nb::handle seed, double interrupt_rate, double short_rate) {
            self.faults->disturb(count_argument(seed, "seed"),
                                 rate_argument(interrupt_rate, "interrupt_rate"),
                                 rate_argument(short_rate, "short_rate"));
          },
          "seed"_a.none(), "interrupt_rate"_a, "short_rate"_a,
          nb::sig("def disturb(self, seed: int, interrupt_rate: float, short_rate: float) -> None"),
          "Every command fails with EINTR or EAGAIN, or is cut short at a random place, with these "
          "probabilities;\n"
          "completions are shuffled. A correct program has the same result as without.")
      .def(
          "commands",
          [](FaultsObject& self, nb::handle op) { return self.faults->commands(op_argument(op)); },
          "op"_a.none(), nb::sig("def commands(self, op: typing.Literal['read', 'write', 'sync']) -> int"),
          "Commands of `op` sent so far.")
      .def_prop_ro(
          "injected", [](FaultsObject& self) { return self.faults->injected(); },
          "Faults that took effect so far (int).");
}

}  // namespace trunkline::python
