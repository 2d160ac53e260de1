// Configurations of generated models: reading what a user gives, filling defaults, refusing what cannot be, and the
// integer arithmetic of dimension expressions. Generated code calls these; it holds no algorithm of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradgen/error.h"

namespace gradgen {

/// Dims and flags by name; flags are 0 or 1.
using ConfigValues = std::vector<std::pair<std::string, std::int64_t>>;

constexpr std::int64_t kMaxDim = std::int64_t{1} << 31;

// Arithmetic of specs: // and % round towards minus infinity; a division by zero or an overflow is a ConfigError.
// Generated code uses the plain operators where the ranges of its operands show that neither can happen.
std::int64_t floor_div(std::int64_t a, std::int64_t b);
std::int64_t floor_mod(std::int64_t a, std::int64_t b);
std::int64_t ceil_div(std::int64_t a, std::int64_t b);
std::int64_t checked_add(std::int64_t a, std::int64_t b);
std::int64_t checked_sub(std::int64_t a, std::int64_t b);
std::int64_t checked_mul(std::int64_t a, std::int64_t b);

/// Reads a configuration in the spec's order. Problems are collected; finish() throws one ConfigError that names all of
/// them.
class ConfigReader {
  public:
    /// `known`: every dim and flag of the model, for suggestions.
    ConfigReader(std::string_view model, const ConfigValues& values, std::span<const std::string_view> known);

    std::int64_t dim(std::string_view name);
    /// `fallback` runs only when the value was not given and everything before it was fine.
    std::int64_t dim(std::string_view name, const std::function<std::int64_t()>& fallback);
    /// The same for dims that may be less than 1.
    std::int64_t dim_from(std::int64_t least, std::string_view name);
    std::int64_t dim_from(std::int64_t least, std::string_view name, const std::function<std::int64_t()>& fallback);
    bool flag(std::string_view name);
    bool flag(std::string_view name, bool fallback);
    void finish() const;

  private:
    const std::int64_t* find(std::string_view name);
    std::int64_t checked_dim(std::string_view name, std::int64_t value, std::int64_t least);

    std::string_view model_;
    const ConfigValues& values_;
    std::vector<std::string> missing_, problems_;
};

/// Throws a ConfigError unless least <= value <= 2^31.
void require_dim(std::string_view model, std::string_view name, std::int64_t value, std::int64_t least = 1);

/// Throws a ConfigError that quotes the requirement, its reason and its place in the spec.
void require(bool holds, std::string_view model, std::string_view that, std::string_view because,
             std::string_view place);

/// "llama has no preset 'x'; did you mean 'y'? It has: ..." (`what`: "preset", "strategy").
ConfigError unknown_choice(std::string_view model, std::string_view what, std::string_view name,
                           std::span<const std::string_view> known);

/// The entry of `known` that `name` most likely misspells, or "".
std::string_view closest(std::string_view name, std::span<const std::string_view> known);

}  // namespace gradgen
