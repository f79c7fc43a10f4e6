// Norms, RoPE and reductions over logits in AVX-512.
#include "base/dispatch.h"
#include "vector/vector_kernels.h"

namespace engine {

void fill_vector_avx512(Kernels& table) {
    fill_vector(table);
}

}  // namespace engine
