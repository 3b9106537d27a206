/* logprob.c - log-softmax over the whole vocabulary, at a few ids.
 *
 *   log p(i) = (z_i - max) - log(sum over j of exp(z_j - max))     the sum by kernels' sum_exp, the rest in double
 */
#include "session/session.h"

void logprob_at(const struct gst_kernels *k, const float *logits, size_t n_vocab, const int32_t *ids, size_t n, float *out)
{
    float max = k->max(logits, n_vocab);
    double log_sum = gst_log((double)k->sum_exp(logits, n_vocab, max));

    for (size_t i = 0; i < n; i++) {
        double lp = ((double)logits[ids[i]] - (double)max) - log_sum;
        out[i] = lp < 0.0 ? (float)lp : 0.0f; /* the sum is at least 1, so this only turns -0 into 0 */
    }
}
