#include "bindings.h"
#include "call_errors.h"
#include "main_interpreter.h"

namespace nb = nanobind;
namespace tlp = trunkline::python;

// Nanobind makes the module's definition; Python calls PyInit__core below.
NB_MODULE(_core_anywhere, module) {
  // A torch tensor over a Buffer that is still alive at exit (in a global model, for example) never releases
  // it: torch frees no memory once the interpreter is finalizing. Users need no warning of that leak.
  nb::set_leak_warnings(false);
  module.doc() = "The engine of Trunkline; use it through the package trunkline.";
  module.attr("version") = TRUNKLINE_VERSION;
  tlp::register_log(module);
  tlp::register_trace(module);
  tlp::register_faults(module);
  tlp::register_future(module);
  tlp::register_engine(module);
  tlp::register_buffer(module);
  tlp::register_pin(module);
  tlp::register_file(module);
  tlp::register_volume(module);
  tlp::register_batch(module);
  tlp::register_ranges(module);
  tlp::register_safetensors(module);
  tlp::register_tensor_files(module);
  tlp::register_replacement_file(module);
  tlp::register_manifest(module);
  tlp::register_checkpoint_store(module);
  tlp::register_stream(module);
  tlp::register_unit_cache(module);
  tlp::register_cache_replay(module);
  tlp::register_table_lookup(module);
  tlp::register_data(module);
  tlp::register_data_scan(module);
  tlp::register_workload(module);
  tlp::register_gc_pause(module);
  tlp::register_shutdown(module);
  tlp::explain_call_errors(module);
}

extern "C" NB_EXPORT PyObject* PyInit__core() { return tlp::main_interpreter_only(&PyInit__core_anywhere); }
