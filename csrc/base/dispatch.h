// One function for each kernel file. The function writes pointers to the kernels of its file into a
// kernel table. At this time, the table already holds the kernels of the next lower instruction
// set.
#pragma once
#include "base/kernels.h"

namespace engine {

void fill_matmul_generic(Kernels& table);
void fill_vector_generic(Kernels& table);
void fill_attention_generic(Kernels& table);
void fill_recurrent_generic(Kernels& table);
void fill_matmul_avx2(Kernels& table);
void fill_matmul_f32_avx2(Kernels& table);
void fill_vector_avx2(Kernels& table);
void fill_attention_avx2(Kernels& table);
void fill_recurrent_avx2(Kernels& table);
void fill_matmul_avxvnni(Kernels& table);
void fill_per_channel_avxvnni(Kernels& table);
void fill_matmul_avx512(Kernels& table);
void fill_matmul_avx512bf16(Kernels& table);
void fill_vector_avx512(Kernels& table);
void fill_attention_avx512(Kernels& table);
void fill_attention_avx512bf16(Kernels& table);
void fill_recurrent_avx512(Kernels& table);
void fill_matmul_amx(Kernels& table);
void fill_matmul_int8_amx(Kernels& table);
void fill_requantize_avx2(Kernels& table);
void fill_per_channel_avx512(Kernels& table);
void fill_per_channel_amx(Kernels& table);
void fill_attention_amx(Kernels& table);
void fill_attention_neon(Kernels& table);
void fill_matmul_f32_neon(Kernels& table);
void fill_per_channel_neon(Kernels& table);
void fill_matmul_neon(Kernels& table);
void fill_matmul_i8mm(Kernels& table);
void fill_per_channel_i8mm(Kernels& table);
void fill_matmul_neonbf16(Kernels& table);

}  // namespace engine
