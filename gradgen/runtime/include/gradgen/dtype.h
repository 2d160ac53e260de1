// Element types and their conversions. bf16 and fp16 are storage formats: arithmetic happens in fp32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gradgen {

enum class DType : std::uint8_t { f32, f64, bf16, f16 };

constexpr std::size_t size_of(DType type) {
    switch (type) {
        case DType::f64:
            return 8;
        case DType::f32:
            return 4;
        case DType::bf16:
        case DType::f16:
            return 2;
    }
    return 0;
}

/// "float32", "float64", "bfloat16", "float16": the names that PyTorch and the specs use.
std::string_view to_string(DType type);

/// Inverse of to_string; throws std::invalid_argument that lists the names.
DType dtype_from_string(std::string_view name);

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};

inline float to_float(bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
float to_float(f16 value);

/// Round to nearest, ties to even. NaN stays NaN (quiet), overflow becomes infinity.
inline bf16 to_bf16(float value) {
    std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
    u += 0x7fffu + ((u >> 16) & 1u);
    return {static_cast<std::uint16_t>(u >> 16)};
}
f16 to_f16(float value);

}  // namespace gradgen
