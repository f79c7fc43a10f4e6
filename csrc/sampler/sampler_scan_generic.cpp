#include "sampler/sampler_scan_body.h"

namespace engine {

const ScanKernels& scan_kernels_generic() {
    return kScanKernels;
}

}  // namespace engine
