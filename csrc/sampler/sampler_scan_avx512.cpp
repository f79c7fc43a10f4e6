#include "sampler/sampler_scan_body.h"

namespace engine {

const ScanKernels& scan_kernels_avx512() {
    return kScanKernels;
}

}  // namespace engine
