// Norms, RoPE and reductions over logits in AVX2, and the second matrices of LoRA adapters.
#include "base/dispatch.h"
#include "vector/expand.h"
#include "vector/vector_kernels.h"

namespace engine {

void fill_vector_avx2(Kernels& table) {
    fill_vector(table);
    fill_expand(table);
}

}  // namespace engine
