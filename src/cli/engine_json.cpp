#include "cli/engine_json.h"

namespace trunkline::cli {

using Json = nlohmann::ordered_json;

Json config_json(const EngineConfig& config) {
  return {{"backend", to_string(config.backend)},
          {"lanes", config.lanes},
          {"queue_depth", config.queue_depth},
          {"block_bytes", config.block_bytes},
          {"pinned_budget_bytes", config.pinned_budget_bytes},
          {"features", config.features}};
}

Json explanation_json(const Explanation& explanation) {
  Json refused = Json::array();
  for (const Refusal& refusal : explanation.refused)
    refused.push_back({{"what", refusal.what}, {"why", refusal.why}});
  return {{"backend", explanation.backend},
          {"direct", explanation.direct},
          {"why", explanation.why},
          {"alignment", {{"memory", explanation.memory_alignment}, {"offset", explanation.offset_alignment}}},
          {"device", explanation.device},
          {"filesystem", explanation.filesystem},
          {"mount", explanation.mount},
          {"gpu", {{"path", explanation.gpu}, {"why", explanation.gpu_why}}},
          {"tuning",
           {{"in_effect", explanation.tuning.in_effect},
            {"time", explanation.tuning.time},
            {"settings", explanation.tuning.settings},
            {"why", explanation.tuning.why}}},
          {"refused", refused}};
}

Json error_json(const Error& error) {
  return {{"kind", to_string(error.kind)},
          {"errno", error.code},
          {"message", error.message},
          {"path", error.path}};
}

}  // namespace trunkline::cli
