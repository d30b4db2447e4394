#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "device/device.h"
#include "engine_object.h"
#include "errors.h"
#include "io/engine_core.h"
#include "trunkline/device.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// A caller's memory, kept and registered (with the CUDA driver; memory of a GPU with cuFile, where that is
// used) until it is closed.
class PinObject {
 public:
  PinObject(nb::handle buffer, nb::handle engine)
      : view_(std::make_unique<BufferView>(buffer, Access::read_only, "buffer", Reach::devices)),
        nbytes_(view_->memory().bytes) {
    view_->keep_storage();
    const MemoryView& memory = view_->memory();
    if (memory.device != nullptr) {
      device_ = name_of(*memory.device);
      registration_ =
          registered([&] { return memory.device->register_for_gds({memory.data, memory.bytes}); });
      return;
    }
    // The budget counts what is registered, which pins of overlapping memory share.
    auto budget = engine_or_default(engine).core()->budget();
    registration_ = registered(
        [&] { return register_host_memory({memory.data, memory.bytes}, std::nullopt, std::move(budget)); });
  }
  PinObject(const PinObject&) = delete;
  PinObject& operator=(const PinObject&) = delete;
  ~PinObject() { close(); }

  void close() {
    if (view_ == nullptr) return;
    // Moved out first: releasing memory can run Python code that calls this again.
    const std::unique_ptr<BufferView> view = std::move(view_);
    const GilReleased unlocked;
    registration_.reset();
  }

  bool closed() const { return view_ == nullptr; }
  std::uint64_t nbytes() const { return nbytes_; }
  const std::string& device() const { return device_; }

 private:
  template <class Register>
  static std::shared_ptr<const void> registered(const Register& make) {
    Result<std::shared_ptr<const void>> made = [&] {
      const GilReleased unlocked;
      return make();
    }();
    if (!made) raise(made.error());
    return *std::move(made);
  }

  std::unique_ptr<BufferView> view_;
  const std::uint64_t nbytes_;
  std::string device_ = "cpu";
  std::shared_ptr<const void> registration_;
};

}  // namespace

void register_pin(nb::module_& module) {
  nb::class_<PinObject>(
      module, "Pin", nb::is_weak_referenceable(),
      "Memory that trunkline.pin has registered for copies to and from GPUs; a context manager "
      "that closes.")
      .def("close", &PinObject::close, "Lets the memory go as it was. Idempotent.")
      .def_prop_ro("closed", &PinObject::closed, "Whether it was closed (bool).")
      .def_prop_ro("nbytes", &PinObject::nbytes, "Size in bytes (int).")
      .def_prop_ro("device", &PinObject::device, "Where the memory is: \"cpu\", \"cuda:0\" (str).")
      .def(
          "__enter__", [](nb::handle_t<PinObject> self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> typing_extensions.Self"))
      .def(
          "__exit__", [](PinObject& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *exc: object) -> None"))
      .def("__repr__", [](const PinObject& self) {
        return fmt::format("<trunkline.Pin nbytes={} device='{}'{}>", self.nbytes(), self.device(),
                           self.closed() ? " closed" : "");
      });
  module.def(
      "pin", [](nb::handle buffer, nb::handle engine) { return new PinObject(buffer, engine); },
      "buffer"_a.none(), nb::kw_only(), "engine"_a = nb::none(),
      nb::sig("def pin(buffer: trunkline._types.ReadableBuffer, *, engine: Engine | None = None) -> Pin"),
      "Registers the memory of a tensor or array on the CPU with the CUDA driver, so that copies to and "
      "from\n"
      "GPUs are asynchronous and fast, until the returned Pin is closed or deleted.\n\n"
      "The memory counts towards the pinned_budget_bytes of the engine (None: the default engine); "
      "OutOfBudget\n"
      "is raised if it does not fit. A pin within pinned memory shares the first pin, and counts only for "
      "its\n"
      "engine; the whole stays pinned until both are closed. Memory that overlaps a pin but is not within "
      "it\n"
      "raises DeviceError: pin the whole first. Memory on a GPU is checked like a buffer of pread, kept "
      "alive,\n"
      "and registered for GPUDirect Storage if this machine supports it: then its transfers need no copy "
      "within\n"
      "the GPU. Raises Unsupported without a GPU, DeviceError if the driver fails (memory that torch has "
      "pinned\n"
      "is already registered). Thread-safe.");
}

}  // namespace trunkline::python
