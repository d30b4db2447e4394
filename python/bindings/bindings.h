// One register_* per concept; module.cpp calls them in the order in which the types need each other.
#pragma once

#include <nanobind/nanobind.h>

namespace trunkline::python {

namespace nb = nanobind;

void register_faults(nb::module_& module);
void register_buffer(nb::module_& module);
void register_log(nb::module_& module);
void register_trace(nb::module_& module);
void register_gc_pause(nb::module_& module);
void register_future(nb::module_& module);
void register_engine(nb::module_& module);
void register_pin(nb::module_& module);
void register_file(nb::module_& module);
void register_volume(nb::module_& module);
void register_batch(nb::module_& module);
void register_ranges(nb::module_& module);
void register_data(nb::module_& module);
void register_safetensors(nb::module_& module);
void register_tensor_files(nb::module_& module);
void register_replacement_file(nb::module_& module);
void register_manifest(nb::module_& module);
void register_checkpoint_store(nb::module_& module);
void register_stream(nb::module_& module);
void register_unit_cache(nb::module_& module);
void register_cache_replay(nb::module_& module);
void register_table_lookup(nb::module_& module);
void register_data_scan(nb::module_& module);
void register_workload(nb::module_& module);
void register_shutdown(nb::module_& module);  // what happens at the interpreter's exit

}  // namespace trunkline::python
