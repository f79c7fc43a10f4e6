// Detects what this CPU can run. It is a program as well: with ENGINE_PRINT_SETS it prints the instruction sets by
// their names in instruction_sets.cmake, which builds the kernels of these for an install on this machine.
#include "base/cpu.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace engine {
namespace {

#if defined(__x86_64__)
struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// Returns the register states that the operating system saves on a context switch, as the bit mask
// XCR0. An instruction set is usable only if the states of its registers are saved.
uint64_t enabled_states() {
    if (!(cpuid(1, 0).ecx >> 27 & 1)) return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

bool has(unsigned word, int bit) {
    return word >> bit & 1;
}

bool has_avx2() {
    Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    bool fma = has(one.ecx, 12), f16c = has(one.ecx, 29);
    return (enabled_states() & 0x6) == 0x6 && fma && f16c && has(seven.ebx, 5);
}

// AVX-VNNI: the int8 dot products of VNNI in registers of 256 bits, which client CPUs without AVX-512 have.
bool has_avx_vnni() {
#if defined(ENGINE_EMULATE_VNNI)
    return true;
#else
    return has(cpuid(7, 1).eax, 4);
#endif
}

// The AVX-512 kernels need the int8 dot products of VNNI, which Cascade Lake, Ice Lake, Zen 4 and later have.
bool has_avx512() {
    Registers seven = cpuid(7, 0);
    bool base = has(seven.ebx, 16) && has(seven.ebx, 17) && has(seven.ebx, 30) && has(seven.ebx, 31);
    return has_avx2() && (enabled_states() & 0xe6) == 0xe6 && base && has(seven.ecx, 11);
}

bool has_avx512_bf16() {
    return has_avx512() && has(cpuid(7, 1).eax, 5);
}

// The CPU must have AMX tiles with bfloat16 arithmetic, and VBMI, which all such CPUs have. On Linux, a process
// must also ask for permission to use the tile registers.
bool has_amx() {
    Registers seven = cpuid(7, 0);
    bool tiles_of_bf16 = has(seven.edx, 22) && has(seven.edx, 24) && has(seven.ecx, 1);
    if (!has_avx512_bf16() || !tiles_of_bf16 || (enabled_states() & 0x60000) != 0x60000) return false;
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool has_int8_tiles() {
    return has(cpuid(7, 0).edx, 25);
}
#elif defined(__aarch64__)
#if defined(__APPLE__)
bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}

#define ENGINE_HAS(feature, word, bit) has("hw.optional.arm.FEAT_" feature)
#elif defined(__linux__)
#define ENGINE_HAS(feature, word, bit) (getauxval(word) >> bit & 1)
#else
#define ENGINE_HAS(feature, word, bit) false
#endif

// The NEON kernels need int8 dot products (sdot) and half-precision arithmetic.
bool has_neon() {
    return ENGINE_HAS("FP16", AT_HWCAP, 10) && ENGINE_HAS("DotProd", AT_HWCAP, 20);
}

bool has_i8mm() {
    return ENGINE_HAS("I8MM", AT_HWCAP2, 13);
}

bool has_neon_bf16() {
    return ENGINE_HAS("BF16", AT_HWCAP2, 14);
}
#undef ENGINE_HAS
#endif

}  // namespace

Cpu this_cpu() {
    Cpu cpu;
#if defined(__x86_64__)
    cpu.avx2 = has_avx2();
    cpu.avx_vnni = cpu.avx2 && has_avx_vnni();
    cpu.avx512 = has_avx512();
    cpu.avx512_bf16 = has_avx512_bf16();
    cpu.amx = has_amx();
    cpu.int8_tiles = has_int8_tiles();
#elif defined(__aarch64__)
    cpu.neon = has_neon();
    cpu.i8mm = cpu.neon && has_i8mm();
    cpu.neon_bf16 = cpu.i8mm && has_neon_bf16();
#endif
    return cpu;
}

}  // namespace engine

#if defined(ENGINE_PRINT_SETS)
#include <cstdio>

int main() {
    const engine::Cpu cpu = engine::this_cpu();
    if (cpu.avx2) std::printf("AVX2;");
    if (cpu.avx_vnni) std::printf("AVXVNNI;");
    if (cpu.avx512) std::printf("AVX512;");
    if (cpu.avx512_bf16) std::printf("AVX512BF16;");
    if (cpu.amx) std::printf("AMX;");
    if (cpu.neon) std::printf("NEON;");
    if (cpu.i8mm) std::printf("I8MM;");
    if (cpu.neon_bf16) std::printf("NEONBF16;");
    return 0;
}
#endif
