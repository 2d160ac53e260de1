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

void check_weights(const std::string& model, const std::vector<WeightDesc>& weights) {
    for (const WeightDesc& weight : weights) {
        if (!weight.present) continue;
        try {
            (void)weight.numel();
        } catch (const std::logic_error& error) {  // negative, or more than can be counted
            throw ConfigError(model + ": " + error.what());
        }
        const auto owns = [&](const WeightDesc& other) { return other.id == weight.tied_to && other.present; };
        if (!weight.tied_to.empty() && std::none_of(weights.begin(), weights.end(), owns)) {
            throw ConfigError(model + ": weight " + in_quotes(weight.id) + " is tied to " + in_quotes(weight.tied_to) +
                              ", which does not exist in this configuration (" + weight.place + ")");
        }
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

std::int64_t ConfigReader::checked_dim(std::string_view name, std::int64_t value) {
    try {
        require_dim(model_, name, value);
    } catch (const ConfigError&) {
        problems_.push_back(in_quotes(name) + " must be between 1 and 2147483648, not " + std::to_string(value));
    }
    return value;
}

std::int64_t ConfigReader::dim(std::string_view name) {
    if (const std::int64_t* value = find(name)) return checked_dim(name, *value);
    missing_.emplace_back(name);
    return 0;
}

std::int64_t ConfigReader::dim(std::string_view name, const std::function<std::int64_t()>& fallback) {
    if (const std::int64_t* value = find(name)) return checked_dim(name, *value);
    if (!missing_.empty() || !problems_.empty()) return 0;
    try {
        return checked_dim(name, fallback());
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

void require_dim(std::string_view model, std::string_view name, std::int64_t value) {
    if (value >= 1 && value <= kMaxDim) return;
    throw ConfigError(std::string(model) + ": " + in_quotes(name) + " must be between 1 and 2147483648, not " +
                      std::to_string(value));
}

void require(bool holds, std::string_view model, std::string_view that, std::string_view because,
             std::string_view place) {
    if (holds) return;
    std::string text = std::string(model) + ": " + std::string(that) + " does not hold";
    if (!because.empty()) text += ": " + std::string(because);
    throw ConfigError(text + " (" + std::string(place) + ")");
}

void check_model(const ModelDesc& model) {
    check_weights(model.name, model.weights);
    for (const BlockDesc& block : model.blocks) {
        if (block.count < 0)
            throw ConfigError(model.name + ": the count of block " + in_quotes(block.id) + " is " +
                              std::to_string(block.count));
        check_weights(model.name, block.weights);
        for (const BlockKind& kind : block.kinds) check_weights(model.name, kind.weights);
    }
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
