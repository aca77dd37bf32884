// Prints what kernels/heuristics/ chooses for the cases on standard input, a line each; see test_heuristics.py.
#include <iostream>
#include <string>

#include "kernels/common/divisor.h"
#include "kernels/heuristics/moe.h"
#include "kernels/heuristics/sm90_moe.h"
#include "kernels/heuristics/sm90_w4a16.h"
#include "kernels/heuristics/w4a16.h"

using namespace trt_nvfp4;

int main() {
    std::string kind;
    while (std::cin >> kind) {
        if (kind == "w4a16") {
            int tiles, chunks, m, cooperative, whole;
            w4a16::Footprint bytes{};
            w4a16::Device device{};
            std::cin >> tiles >> chunks >> m >> bytes.stage >> bytes.chunk >> bytes.fixed >> device.sm_count >>
                device.shared_bytes >> cooperative >> whole;
            device.cooperative = cooperative != 0;
            int const capacity = w4a16::staged_tile_capacity(bytes, device);
            if (capacity == 0) {
                std::cout << "0 0 0 0 0 0\n";
                continue;
            }
            w4a16::Split const split = w4a16::choose_split({tiles, chunks}, m, capacity, 2.0f, whole != 0, device);
            w4a16::SharedMemory const memory =
                w4a16::divide_shared_memory(w4a16::ceil_div(chunks, split.splits), capacity, bytes, device);
            std::cout << capacity << ' ' << split.groups << ' ' << split.splits << ' ' << memory.staged_tile_chunks
                      << ' ' << memory.stages << ' ' << memory.bytes << '\n';
        } else if (kind == "sm90") {
            int rows, chunks, cluster, clusters;
            std::cin >> rows >> chunks >> cluster >> clusters;
            sm90::Split const split = sm90::choose_split(rows, chunks, cluster, clusters);
            std::cout << split.splits << ' ' << split.tasks(rows) << ' ' << sm90::padded_rows(rows, cluster) << '\n';
        } else if (kind == "sm90_layers") {
            int m, up_rows, hidden, norm, sms;
            std::cin >> m >> up_rows >> hidden >> norm >> sms;
            std::cout << sm90::takes_layers(m, up_rows, hidden, norm != 0, sms) << '\n';
        } else if (kind == "sm90_linear") {
            int m, bf16;
            int64_t n, k;
            std::cin >> m >> n >> k >> bf16;
            std::cout << sm90::takes_linear(m, n, k, bf16 != 0) << '\n';
        } else if (kind == "w4a16_in_flight") {
            int64_t bytes;
            std::cin >> bytes;
            std::cout << w4a16::keeps_few_in_flight(bytes) << '\n';
        } else if (kind == "w4a16_small") {
            int tiles, chunks, cluster;
            int64_t values;
            w4a16::Footprint bytes{};
            w4a16::Device device{};
            std::cin >> tiles >> values >> chunks >> cluster >> bytes.stage >> bytes.chunk >> bytes.fixed >>
                device.sm_count >> device.shared_bytes;
            w4a16::SmallLinear const small = w4a16::small_linear(chunks, cluster, 2, bytes, device);
            std::cout << w4a16::fits_small(tiles, values, small, device) << ' ' << small.steps << ' ' << small.stages
                      << ' ' << w4a16::small_bytes(small, bytes) << '\n';
        } else if (kind == "w4a16_small_cluster") {
            int major, m, k;
            std::cin >> major >> m >> k;
            std::cout << w4a16::choose_small_cluster(major, m, k) << '\n';
        } else if (kind == "in_flight") {
            int sms;
            float bandwidth;
            std::cin >> sms >> bandwidth;
            std::cout << choose_in_flight(4 * 4608, sms, bandwidth * 1e9f) << ' '
                      << sm90::choose_ahead(18432, sms, bandwidth * 1e9f) << ' '
                      << choose_in_flight(4 * 4608, sms, bandwidth * 1e9f, kSmallSeconds) << '\n';
        } else if (kind == "divisor") {
            int n, divisor;
            std::cin >> n >> divisor;
            std::cout << Divisor(divisor).of(n) << '\n';
        } else if (kind == "sm90_tickets") {
            int64_t items, of_item;
            std::cin >> items >> of_item;
            std::cout << sm90::divides_tickets(items, of_item) << '\n';
        } else if (kind == "sm90_mixture") {
            int tiles, sms;
            std::cin >> tiles >> sms;
            std::cout << sm90::takes_mixture(tiles, sms) << '\n';
        } else if (kind == "sm90_job_tokens") {
            double pairs;
            std::cin >> pairs;
            std::cout << sm90::choose_item_tokens(pairs) << '\n';
        } else if (kind == "sm90_even_shares") {
            int tokens, tiles, sms;
            std::cin >> tokens >> tiles >> sms;
            std::cout << sm90::shares_evenly(tokens, tiles, sms) << '\n';
        } else if (kind == "sm90_mixture_splits") {
            int tiles, chunks, sms;
            std::cin >> tiles >> chunks >> sms;
            std::cout << sm90::choose_mixture_splits(tiles, chunks, sms) << '\n';
        } else if (kind == "sm90_even_splits") {
            int tiles, chunks, sms;
            std::cin >> tiles >> chunks >> sms;
            std::cout << sm90::choose_even_splits(tiles, chunks, sms) << '\n';
        } else if (kind == "moe_columns") {
            int tokens, top_k, experts, chunks;
            std::cin >> tokens >> top_k >> experts >> chunks;
            std::cout << w4a16::moe_columns(tokens, top_k, experts, chunks) << '\n';
        } else if (kind == "moe") {
            int wanted, least, stage, fixed;
            w4a16::Device device{};
            std::cin >> wanted >> least >> stage >> fixed >> device.shared_bytes;
            w4a16::MoeMemory const memory = w4a16::divide_moe_memory(wanted, least, stage, fixed, device);
            std::cout << memory.stages << ' ' << memory.staged_tile_bytes << '\n';
        }
    }
}
