#include "gradgen/config.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "gradgen/tables.h"

namespace gradgen {
namespace {

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string joined(std::span<const std::string_view> names) {
    std::string out;
    for (std::string_view name : names) out += (out.empty() ? "" : ", ") + std::string(name);
    return out.empty() ? "none" : out;
}

/// Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = std::exchange(row[0], i);
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, substituted}));
        }
    }
    return row.back();
}

std::string suggestion(std::string_view name, std::span<const std::string_view> known) {
    const std::string_view near = closest(name, known);
    return near.empty() ? "" : "; did you mean " + in_quotes(near) + "?";
}

/// The weights that the owner of a tensor is among; nullptr where the block or layer does not exist.
const std::vector<WeightDesc>* owners_of(const ModelDesc& model, const std::vector<WeightDesc>& weights,
                                         const WeightDesc& weight) {
    if (weight.tied_block == kSameScope) return &weights;
    if (weight.tied_block < 0) return &model.weights;
    const BlockDesc& block = model.blocks.at(static_cast<std::size_t>(weight.tied_block));
    const std::int64_t layer = weight.tied_layer;
    if (block.kinds.empty()) return layer >= 0 && layer < block.count ? &block.weights : nullptr;
    for (const BlockKind& kind : block.kinds)
        if (std::binary_search(kind.layers.begin(), kind.layers.end(), layer)) return &kind.weights;
    return nullptr;
}

void check_tie(const ModelDesc& model, const std::vector<WeightDesc>& weights, const WeightDesc& weight) {
    std::string owner = in_quotes(weight.tied_to);
    if (weight.tied_block >= 0)
        owner += " of block " + in_quotes(model.blocks.at(static_cast<std::size_t>(weight.tied_block)).id) + " layer " +
                 std::to_string(weight.tied_layer);
    const auto refuse = [&](const std::string& why) {
        throw ConfigError(model.name + ": weight " + in_quotes(weight.id) + " is tied to " + owner + ", which " + why +
                          " (" + weight.place + ")");
    };
    const std::vector<WeightDesc>* family = owners_of(model, weights, weight);
    if (!family) refuse("does not exist in this configuration");
    const auto is_owner = [&](const WeightDesc& other) { return other.id == weight.tied_to && other.present; };
    const auto found = std::find_if(family->begin(), family->end(), is_owner);
    if (found == family->end()) refuse("does not exist in this configuration");
    if (!found->tied_to.empty()) refuse("is tied itself");
    if (found->shape != weight.shape) refuse("has another shape");
    if (weight.trainable && !found->trainable) refuse("is frozen: its gradient would have no place");
}

void check_weights(const ModelDesc& model, const std::vector<WeightDesc>& weights) {
    for (const WeightDesc& weight : weights) {
        if (!weight.present) continue;
        try {
            (void)weight.numel();
        } catch (const std::logic_error& error) {  // negative, or more than can be counted
            throw ConfigError(model.name + ": " + error.what());
        }
        if (weight.uses < 0)
            throw ConfigError(model.name + ": weight " + in_quotes(weight.id) + " has a negative `uses`");
        if (!weight.tied_to.empty()) check_tie(model, weights, weight);
    }
}

[[noreturn]] void overflow() { throw ConfigError("the result of an expression does not fit in 63 bits"); }

void require_divisor(std::int64_t a, std::int64_t b) {
    if (b == 0) throw ConfigError("division by zero");
    if (b == -1 && a == std::numeric_limits<std::int64_t>::min()) overflow();
}

}  // namespace

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
    require_divisor(a, b);
    return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

std::int64_t floor_mod(std::int64_t a, std::int64_t b) {
    require_divisor(a, b);
    const std::int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
    require_divisor(a, b);
    return a / b + (a % b != 0 && (a < 0) == (b < 0) ? 1 : 0);
}

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
    std::int64_t out = 0;
    if (__builtin_add_overflow(a, b, &out) || out == std::numeric_limits<std::int64_t>::min()) overflow();
    return out;
}

std::int64_t checked_sub(std::int64_t a, std::int64_t b) {
    std::int64_t out = 0;
    if (__builtin_sub_overflow(a, b, &out) || out == std::numeric_limits<std::int64_t>::min()) overflow();
    return out;
}

std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
    std::int64_t out = 0;
    if (__builtin_mul_overflow(a, b, &out) || out == std::numeric_limits<std::int64_t>::min()) overflow();
    return out;
}

std::string_view closest(std::string_view name, std::span<const std::string_view> known) {
    std::string_view best;
    std::size_t least = name.size() / 3 + 2;  // further away than this is another word
    for (std::string_view candidate : known) {
        const std::size_t d = distance(name, candidate);
        if (d < least) least = d, best = candidate;
    }
    return best;
}

ConfigReader::ConfigReader(std::string_view model, const ConfigValues& values, std::span<const std::string_view> known)
    : model_(model), values_(values) {
    for (auto item = values.begin(); item != values.end(); ++item) {
        const auto same = [&](const auto& other) { return other.first == item->first; };
        if (std::find(known.begin(), known.end(), item->first) == known.end()) {
            problems_.push_back("unknown dim or flag " + in_quotes(item->first) + suggestion(item->first, known));
        } else if (std::any_of(values.begin(), item, same)) {
            problems_.push_back(in_quotes(item->first) + " is given twice");
        }
    }
}

const std::int64_t* ConfigReader::find(std::string_view name) {
    for (const auto& [key, value] : values_) {
        if (key == name) return &value;
    }
    return nullptr;
}

std::int64_t ConfigReader::checked_dim(std::string_view name, std::int64_t value, std::int64_t least) {
    try {
        require_dim(model_, name, value, least);
    } catch (const ConfigError&) {
        problems_.push_back(in_quotes(name) + " must be between " + std::to_string(least) + " and 2147483648, not " +
                            std::to_string(value));
    }
    return value;
}

std::int64_t ConfigReader::dim(std::string_view name) { return dim_from(1, name); }

std::int64_t ConfigReader::dim(std::string_view name, const std::function<std::int64_t()>& fallback) {
    return dim_from(1, name, fallback);
}

std::int64_t ConfigReader::dim_from(std::int64_t least, std::string_view name) {
    if (const std::int64_t* value = find(name)) return checked_dim(name, *value, least);
    missing_.emplace_back(name);
    return 0;
}

std::int64_t ConfigReader::dim_from(std::int64_t least, std::string_view name,
                                    const std::function<std::int64_t()>& fallback) {
    if (const std::int64_t* value = find(name)) return checked_dim(name, *value, least);
    if (!missing_.empty() || !problems_.empty()) return 0;
    try {
        return checked_dim(name, fallback(), least);
    } catch (const ConfigError& error) {
        problems_.push_back("the default of " + in_quotes(name) + " cannot be computed: " + error.what());
        return 0;
    }
}

bool ConfigReader::flag(std::string_view name) {
    if (find(name)) return flag(name, false);
    missing_.emplace_back(name);
    return false;
}

bool ConfigReader::flag(std::string_view name, bool fallback) {
    const std::int64_t* value = find(name);
    if (!value) return fallback;
    if (*value != 0 && *value != 1)
        problems_.push_back(in_quotes(name) + " must be true or false, not " + std::to_string(*value));
    return *value != 0;
}

void ConfigReader::finish() const {
    std::string text;
    for (const std::string& name : missing_) text += (text.empty() ? "missing " : ", ") + in_quotes(name);
    for (const std::string& problem : problems_) text += (text.empty() ? "" : "; ") + problem;
    if (!text.empty()) throw ConfigError(std::string(model_) + ": " + text);
}

void require_dim(std::string_view model, std::string_view name, std::int64_t value, std::int64_t least) {
    if (value >= least && value <= kMaxDim) return;
    throw ConfigError(std::string(model) + ": " + in_quotes(name) + " must be between " + std::to_string(least) +
                      " and 2147483648, not " + std::to_string(value));
}

void require(bool holds, std::string_view model, std::string_view that, std::string_view because,
             std::string_view place) {
    if (holds) return;
    std::string text = std::string(model) + ": " + std::string(that) + " does not hold";
    if (!because.empty()) text += ": " + std::string(because);
    throw ConfigError(text + " (" + std::string(place) + ")");
}

void check_model(const ModelDesc& model) {
    check_weights(model, model.weights);
    for (const BlockDesc& block : model.blocks) {
        if (block.count < 0)
            throw ConfigError(model.name + ": the count of block " + in_quotes(block.id) + " is " +
                              std::to_string(block.count));
        check_weights(model, block.weights);
        for (const BlockKind& kind : block.kinds) check_weights(model, kind.weights);
    }
}

std::int64_t declared_uses(std::int64_t uses) {
    if (uses < 1 || uses > kMaxLayers)
        throw ConfigError("`uses` is " + std::to_string(uses) + "; it lies between 1 and " +
                          std::to_string(kMaxLayers));
    return uses;
}

void for_experts(const WeightDesc& weight, std::int64_t experts, std::vector<WeightDesc>& out) {
    if (experts < 0 || experts > 65536)
        throw ConfigError("weight " + in_quotes(weight.id) + " has " + std::to_string(experts) +
                          " experts; there may be up to 65536 (" + weight.place + ")");
    const std::size_t at = weight.name.find("{e}");
    for (std::int64_t e = 0; e < experts; ++e) {
        WeightDesc& desc = out.emplace_back(weight);
        desc.id += "." + std::to_string(e);
        if (at != std::string::npos) desc.name.replace(at, 3, std::to_string(e));
    }
}

std::vector<Tensor> tensors_of(const TensorContainer& tensors, std::string_view id) {
    std::vector<Tensor> out;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::string& one = tensors.id(i);
        if (one.size() > id.size() && one.starts_with(id) && one[id.size()] == '.') out.push_back(tensors.tensor(i));
    }
    return out;
}

std::vector<std::int64_t> all_layers(const BlockDesc& block) {
    if (block.count < 0 || block.count > kMaxLayers)
        throw ConfigError("block " + in_quotes(block.id) + " has a count of " + std::to_string(block.count) +
                          "; between 0 and " + std::to_string(kMaxLayers) + " blocks can be told apart by their index");
    std::vector<std::int64_t> out(static_cast<std::size_t>(block.count));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::int64_t>(i);
    return out;
}

std::vector<std::int64_t> layers_of(const BlockDesc& block, std::vector<std::int64_t> layers) {
    if (!layers.empty() && layers.back() >= block.count)
        throw ConfigError("block " + in_quotes(block.id) + " has the index " + std::to_string(layers.back()) +
                          " under `at`, and its count is " + std::to_string(block.count));
    return layers;
}

ConfigError unknown_choice(std::string_view model, std::string_view what, std::string_view name,
                           std::span<const std::string_view> known) {
    const std::string hint = suggestion(name, known);
    return ConfigError(std::string(model) + " has no " + std::string(what) + " " + in_quotes(name) +
                       (hint.empty() ? ";" : hint) + " it has " + joined(known));
}

}  // namespace gradgen
