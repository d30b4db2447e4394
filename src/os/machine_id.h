// Which machine this is: for measurements that hold on one machine only.
#pragma once

#include <string>

namespace trunkline::os {

// 16 hexadecimal digits, the same until the machine is installed anew: a hash of /etc/machine-id, which
// itself must not be passed on (machine-id(5)), or of the host's name where there is no such file.
std::string machine_id();

}  // namespace trunkline::os
