// Fills a kernel table for each instruction set that this CPU has and whose kernels were built. The build defines
// ENGINE_AVX2 and so on for those (instruction_sets.cmake).
#include "base/dispatch.h"

#include "base/cpu.h"

namespace engine {
namespace {

KernelSet find_kernels() {
    static Kernels generic{};
    KernelSet set{};
    auto add = [&set](Kernels& table, const char* name) {
        table.name = name;
        set.tables[set.count++] = &table;
    };
    fill_matmul_generic(generic);
    fill_vector_generic(generic);
    fill_attention_generic(generic);
    fill_recurrent_generic(generic);
    add(generic, "generic");
    [[maybe_unused]] const Cpu cpu = this_cpu();
#if defined(ENGINE_AVX2)
    static Kernels avx2{};
    if (!cpu.avx2) return set;
    avx2 = generic;
    fill_matmul_avx2(avx2);
    fill_matmul_f32_avx2(avx2);
    fill_vector_avx2(avx2);
    fill_attention_avx2(avx2);
    fill_recurrent_avx2(avx2);
    add(avx2, "avx2");
#endif
#if defined(ENGINE_AVXVNNI)
    static Kernels avx_vnni{};
    if (cpu.avx_vnni) {
        avx_vnni = avx2;
        fill_matmul_avxvnni(avx_vnni);
        fill_requantize_avx2(avx_vnni);
        fill_per_channel_avxvnni(avx_vnni);
        add(avx_vnni, "avx_vnni");
    }
#endif
#if defined(ENGINE_AVX512)
    static Kernels avx512{};
    if (!cpu.avx512) return set;
    avx512 = avx2;
    fill_matmul_avx512(avx512);
    fill_vector_avx512(avx512);
    fill_attention_avx512(avx512);
    fill_recurrent_avx512(avx512);
    fill_requantize_avx2(avx512);
    fill_per_channel_avx512(avx512);
    add(avx512, "avx512");
#endif
#if defined(ENGINE_AVX512BF16)
    static Kernels avx512_bf16{};
    if (!cpu.avx512_bf16) return set;
    avx512_bf16 = avx512;
    fill_matmul_avx512bf16(avx512_bf16);
    fill_attention_avx512bf16(avx512_bf16);
    add(avx512_bf16, "avx512_bf16");
#endif
#if defined(ENGINE_AMX)
    static Kernels amx{};
    if (!cpu.amx) return set;
    amx = avx512_bf16;
    fill_matmul_amx(amx);
    fill_attention_amx(amx);
    if (cpu.int8_tiles) {
        fill_matmul_int8_amx(amx);
        fill_per_channel_amx(amx);
    }
    add(amx, "amx");
#endif
#if defined(ENGINE_NEON)
    static Kernels neon{};
    if (!cpu.neon) return set;
    neon = generic;
    fill_matmul_neon(neon);
    fill_matmul_f32_neon(neon);
    fill_per_channel_neon(neon);
    fill_attention_neon(neon);
    add(neon, "neon");
#endif
#if defined(ENGINE_I8MM)
    static Kernels i8mm{};
    if (!cpu.i8mm) return set;
    i8mm = neon;
    fill_matmul_i8mm(i8mm);
    fill_per_channel_i8mm(i8mm);
    add(i8mm, "i8mm");
#endif
#if defined(ENGINE_NEONBF16)
    static Kernels neon_bf16{};
    if (!cpu.neon_bf16) return set;
    neon_bf16 = i8mm;
    fill_matmul_neonbf16(neon_bf16);
    add(neon_bf16, "neon_bf16");
#endif
    return set;
}

}  // namespace

const KernelSet& kernel_set() {
    static const KernelSet set = find_kernels();
    return set;
}

}  // namespace engine
