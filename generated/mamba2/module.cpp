// Python's view of specs/mamba2.yaml. The methods are bound once, in the runtime.
#include "gradgen/bind_model.h"
#include "manager.h"

namespace model = gradgen::models::mamba2;

PYBIND11_MODULE(GRADGEN_MODEL_MODULE, m) {
    gradgen::bind::model<model::Config>(m, model::describe, model::make_gradient_manager, "mamba2");
    gradgen::bind::strategy<model::UnshardedGradientManager>(m, "UnshardedGradientManager");
    gradgen::bind::strategy<model::ShardedGradientManager>(m, "ShardedGradientManager");
    gradgen::bind::strategy<model::ShardedAllToAllGradientManager>(m, "ShardedAllToAllGradientManager");
    gradgen::bind::strategy<model::ReplicatedGradientManager>(m, "ReplicatedGradientManager");
    gradgen::bind::strategy<model::FullyShardedGradientManager>(m, "FullyShardedGradientManager");
}
