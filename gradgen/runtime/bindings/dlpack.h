// The DLPack ABI (versions 0.8 and 1.0), as https://dmlc.github.io/dlpack specifies it: structures only, no code.
#pragma once

#include <cstdint>

namespace gradgen::dlpack {

struct Version {
    std::uint32_t major, minor;
};
struct DeviceInfo {
    std::int32_t type;  // 1 CPU, 2 CUDA
    std::int32_t id;
};
struct DataType {
    std::uint8_t code;  // 2 float, 4 bfloat
    std::uint8_t bits;
    std::uint16_t lanes;
};
struct View {
    void* data;
    DeviceInfo device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};
struct Managed {
    View view;
    void* context;
    void (*deleter)(Managed*);
};
struct ManagedVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedVersioned*);
    std::uint64_t flags;
    View view;
};

}  // namespace gradgen::dlpack
