// Host and device sides of one operand, with canaries around the segments.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../cpp/check.h"
#include "gradgen/dtype.h"
#include "gradgen/error.h"
#include "gradgen/kernels.h"

namespace gpu {

using namespace gradgen;

inline void ok(cudaError_t status) {
    if (status != cudaSuccess) throw Error(cudaGetErrorString(status));
}

/// An object in device memory.
template <class T>
class Device {
  public:
    explicit Device(std::size_t count = 1) : count_(count) {
        void* data = nullptr;
        ok(cudaMalloc(&data, count * sizeof(T)));
        data_.reset(static_cast<T*>(data));
    }
    explicit Device(const T& value) : Device() { set(value); }
    T* get() const { return data_.get(); }
    void set(const T& value) { ok(cudaMemcpy(get(), &value, sizeof(T), cudaMemcpyHostToDevice)); }
    void zero() { ok(cudaMemset(get(), 0, count_ * sizeof(T))); }
    T read() const {
        T value;
        ok(cudaMemcpy(&value, get(), sizeof(T), cudaMemcpyDeviceToHost));
        return value;
    }

  private:
    struct Free {
        void operator()(T* data) const { cudaFree(data); }
    };
    std::size_t count_;
    std::unique_ptr<T, Free> data_;
};

enum class Values { mixed, special, tiny, huge };

inline std::uint32_t hash(std::uint64_t x) {
    x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
    x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
    return static_cast<std::uint32_t>(x ^ (x >> 33));
}

inline double value(Values kind, DType type, std::uint64_t index) {
    const std::uint32_t h = hash(index);
    const double sign = h & 1 ? -1 : 1, fraction = 1 + (h >> 8) * 0x1p-24;
    const int spread = static_cast<int>(h >> 1 & 15);
    const bool small_range = type == DType::f16;
    switch (kind) {
        case Values::mixed:
            return sign * std::ldexp(fraction, spread - 10);
        case Values::tiny:
            return sign * std::ldexp(fraction, spread - (small_range ? 26 : 140));
        case Values::huge:
            return sign * std::ldexp(fraction, small_range ? 15 - spread / 8 : 127 - spread / 4);
        case Values::special:
            break;
    }
    constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
    const double specials[] = {0.0, -0.0, kInf, -kInf, kNan, 65504, 65519, 0x1p-24, 0x1p-25, 3.3895314e38};
    return h % 7 == 0 ? specials[h / 7 % 10] : sign * std::ldexp(fraction, spread - 10);
}

/// Memory of `numel` elements on both sides; the device's starts `shift` elements behind a 256-byte boundary.
class Buffer {
  public:
    Buffer(DType type, std::int64_t numel, int shift = 0)
        : type_(type),
          shift_(static_cast<std::size_t>(shift) * size_of(type)),
          host_(static_cast<std::size_t>(numel) * size_of(type), 0xff),
          inside_(static_cast<std::size_t>(numel), 0),
          device_(host_.size() + shift_ + 1) {}

    /// Values for the elements of the segments; the rest stays a canary, a pattern that reads as NaN in every type.
    void fill(const std::vector<Segment>& segments, bool arena, Values kind, std::uint64_t seed) {
        for (const Segment& part : segments) {
            for (std::int64_t i = 0; i < part.numel; ++i) {
                const auto at = static_cast<std::size_t>((arena ? part.source : part.shard) + i);
                inside_[at] = 1;
                put(at, value(kind, type_, seed * 1000003 + at));
            }
        }
    }

    void upload() { ok(cudaMemcpy(device(), host_.data(), host_.size(), cudaMemcpyHostToDevice)); }
    void* host() { return host_.data(); }
    void* device() { return device_.get() + shift_; }

    /// The device's bytes against the host's: equal, or both NaN inside of a segment.
    void compare(const std::string& name) {
        std::vector<unsigned char> got(host_.size());
        ok(cudaMemcpy(got.data(), device(), got.size(), cudaMemcpyDeviceToHost));
        if (got == host_) return;
        const std::size_t size = size_of(type_);
        for (std::size_t i = 0; i < inside_.size(); ++i) {
            if (std::memcmp(&got[i * size], &host_[i * size], size) == 0) continue;
            const double a = get(got, i), b = get(host_, i);
            check::that(inside_[i] && std::isnan(a) && std::isnan(b),
                        name + " at " + std::to_string(i) + (inside_[i] ? "" : " (canary)") + ": " + check::number(a) +
                            ", the CPU has " + check::number(b));
        }
    }

  private:
    void put(std::size_t at, double x) {
        const auto single = static_cast<float>(x);
        unsigned char* to = &host_[at * size_of(type_)];
        if (type_ == DType::f64) std::memcpy(to, &x, 8);
        if (type_ == DType::f32) std::memcpy(to, &single, 4);
        const std::uint16_t half = type_ == DType::bf16 ? to_bf16(single).bits : to_f16(single).bits;
        if (size_of(type_) == 2) std::memcpy(to, &half, 2);
    }

    double get(const std::vector<unsigned char>& bytes, std::size_t at) const {
        const unsigned char* from = &bytes[at * size_of(type_)];
        std::uint64_t bits = 0;
        std::memcpy(&bits, from, size_of(type_));
        if (type_ == DType::f64) return std::bit_cast<double>(bits);
        if (type_ == DType::f32) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        const auto half = static_cast<std::uint16_t>(bits);
        return type_ == DType::bf16 ? to_float(bf16{half}) : to_float(f16{half});
    }

    DType type_;
    std::size_t shift_;
    std::vector<unsigned char> host_;
    std::vector<char> inside_;
    Device<unsigned char> device_;
};

inline void compare_stats(const std::string& name, const ReduceStats& got, const ReduceStats& want) {
    check::that(got.nonfinite == want.nonfinite, name + ": " + std::to_string(got.nonfinite) +
                                                     " non-finite, the CPU has " + std::to_string(want.nonfinite));
    const bool close = std::isfinite(want.sum_squares)
                           ? std::fabs(got.sum_squares - want.sum_squares) <= 1e-6 * want.sum_squares
                           : !std::isfinite(got.sum_squares);
    check::that(close, name + ": sum of squares " + check::number(got.sum_squares) + ", the CPU has " +
                           check::number(want.sum_squares));
}

}  // namespace gpu
