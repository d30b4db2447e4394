// The whole public surface.
#pragma once

#include "trunkline/buffer.h"
#include "trunkline/checksum.h"
#include "trunkline/device.h"
#include "trunkline/engine.h"
#include "trunkline/error.h"
#include "trunkline/fault.h"
#include "trunkline/file.h"
#include "trunkline/future.h"
#include "trunkline/memory.h"
#include "trunkline/stats.h"
#include "trunkline/stream.h"
#include "trunkline/tensors.h"
#include "trunkline/trace.h"
#include "trunkline/unit_cache.h"
#include "trunkline/units.h"
#include "trunkline/volume.h"
