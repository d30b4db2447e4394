// Finds the records of TFRecord files.
#pragma once

#include <string>

#include "records/scan.h"
#include "records/source.h"
#include "records/tfrecord_framing.h"
#include "trunkline/error.h"

namespace trunkline::records {

// Finds the records, with heads and tails. Verifies the checksums of lengths, and that all records are within
// the file; not the data. `path` is for messages.
Result<Ranges> scan_tfrecords(Source& source, const std::string& path, const ScanOptions& options);

}  // namespace trunkline::records
