// The Python class Engine.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "gil.h"
#include "trunkline/engine.h"

namespace trunkline::python {

struct EngineObject {
  explicit EngineObject(Engine engine_in) : engine(std::move(engine_in)) {}
  EngineObject(const EngineObject&) = delete;
  EngineObject& operator=(const EngineObject&) = delete;
  ~EngineObject() {
    const GilReleased unlocked;  // the last handle waits for the lanes
    engine = Engine();
  }

  Engine engine;
};

// None is nullopt: the process's default engine, whichever that is at the time of use.
std::optional<Engine> engine_argument(nanobind::handle value);

// The default engine as it is now for None.
Engine engine_or_default(nanobind::handle value);

}  // namespace trunkline::python
