// Compares the declarations of src/device with those of NVIDIA's headers, at compile time.
#pragma once

#include <cstddef>
#include <type_traits>

namespace trunkline::nvidia_headers {

// Whether arguments of both types are passed alike: as addresses, or as numbers of one size.
template <class Ours, class Theirs>
constexpr bool passed_alike() {
  if constexpr (std::is_void_v<Ours> || std::is_void_v<Theirs>) {
    return std::is_void_v<Ours> && std::is_void_v<Theirs>;
  } else {
    constexpr bool ours_is_number = std::is_integral_v<Ours> || std::is_enum_v<Ours>;
    constexpr bool theirs_is_number = std::is_integral_v<Theirs> || std::is_enum_v<Theirs>;
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
           std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && ours_is_number == theirs_is_number &&
           std::is_class_v<Ours> == std::is_class_v<Theirs>;
  }
}

// Whether what two pointers lead to has one size; void matches anything, and so do handles.
template <class Ours, class Theirs>
constexpr bool leads_alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OurTarget = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using TheirTarget = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_object_v<OurTarget> && std::is_object_v<TheirTarget>) {
      // Handles are pointers to structs without a definition.
      if constexpr (requires { sizeof(OurTarget); } && requires { sizeof(TheirTarget); })
        // A struct may have room for fields of newer versions; check.cpp compares the fields.
        return std::is_class_v<OurTarget> && std::is_class_v<TheirTarget>
                   ? sizeof(OurTarget) >= sizeof(TheirTarget)
                   : passed_alike<OurTarget, TheirTarget>();
    }
  }
  return true;
}

template <class Ours, class Theirs>
struct Alike : std::false_type {};

template <class OurResult, class... Ours, class TheirResult, class... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct Alike<OurResult (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<passed_alike<OurResult, TheirResult>() && (passed_alike<Ours, Theirs>() && ...) &&
                         (leads_alike<Ours, Theirs>() && ...)> {};

}  // namespace trunkline::nvidia_headers
