// What this CPU can run, and its operating system lets it. Kernels of an instruction set run if they were built, too.
#pragma once

namespace engine {

struct Cpu {
    // x86-64. Each of avx2, avx512, avx512_bf16 and amx implies those before it; avx_vnni implies avx2.
    bool avx2 = false, avx_vnni = false, avx512 = false, avx512_bf16 = false, amx = false;
    bool int8_tiles = false;
    // aarch64. Each implies those before it.
    bool neon = false, i8mm = false, neon_bf16 = false;
};

// On Linux, this also asks for permission to use the tile registers of AMX.
Cpu this_cpu();

}  // namespace engine
