#include "gradgen/dtype.h"

#include <stdexcept>
#include <string>

#include "convert.h"

namespace gradgen {

std::string_view to_string(DType type) {
    switch (type) {
        case DType::f32:
            return "float32";
        case DType::f64:
            return "float64";
        case DType::bf16:
            return "bfloat16";
        case DType::f16:
            return "float16";
    }
    throw std::invalid_argument("not a DType: " + std::to_string(static_cast<int>(type)));
}

DType dtype_from_string(std::string_view name) {
    for (const DType type : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
        if (name == to_string(type)) return type;
    }
    throw std::invalid_argument("unknown dtype '" + std::string(name) +
                                "': expected float32, float64, bfloat16 or float16");
}

float to_float(f16 value) { return convert::as_float(convert::f16_to_f32(static_cast<std::uint32_t>(value.bits))); }

f16 to_f16(float value) {
    return {static_cast<std::uint16_t>(convert::f16_nearest(std::bit_cast<std::uint32_t>(value)))};
}

}  // namespace gradgen
