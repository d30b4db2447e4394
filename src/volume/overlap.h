// Whether what is in the directories of a volume can be replaced or removed without damage to a file that is
// striped over other directories, some of which are among these.
#pragma once

#include <string_view>

#include "volume/stripe_files.h"

namespace trunkline::volume {

// Rule, for a volume of k directories (docs/formats/stripe.md, "Directories of another file"):
// 1. No descriptor names another number of directories than k.
// 2. If the descriptors of one file are in all k directories, in whatever order, it is all here.
// 3. Otherwise it is a file that lost something, or whose creation, overwriting or removal was interrupted,
// if
//    - there are no members, the first directory has a descriptor, and all descriptors are of one file and in
//      their places; or
//    - each directory has a descriptor or a member, and all descriptors are of one file and in their places,
//      or nothing is in any member.
// 4. Anything else may be part of a file whose other parts are elsewhere: `corrupt`. `action` is for the
//    message: "overwrite", "remove".
// There must be a descriptor. One that is not valid counts as missing; one that cannot be read, or is of a
// newer version, is an error.
Status check_no_overlap(const StripeFiles& files, const StripeFiles::Presence& presence,
                        std::string_view action);

}  // namespace trunkline::volume
