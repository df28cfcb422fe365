// SPDX-License-Identifier: Apache-2.0
//
// What the chunk store makes of the disk: write-backs and fetches of chunks against the
// best that plain loops with O_DIRECT reach on the same disk in the same run. Disks
// change by the hour and by the second, so raw and ours take turns; the ratio is that of
// medians over the rounds: ours / the best of nine raw ways (1, 4, 16 MiB x 1, 4, 16 threads).
// (The ideal time of a mixed load is that of its writes and then its reads; disks that do
// both at once may be faster.)
//
// Usage: bench_spill [folder] [MiB of file] [rounds]
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "patrickstar/base/error.h"
#include "patrickstar/chunk/chunk_store.h"
#include "patrickstar/io/os_file.h"
#include "raw_disk.h"

namespace patrickstar::benchmarks {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr size_t kChunksPerOperation = 4;

class NullBinder final : public Binder {
 public:
  void Attach(ChunkId, std::byte*) noexcept override {}
  void Detach(ChunkId) noexcept override {}
  std::string Describe(ChunkId) override { return "chunk"; }
};

double SecondsOf(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A store whose chunks are together as large as the file, with memory for half of them, and
// fillers: chunks that are never written, so that they make others leave and cost no I/O. The
// memory has been in use before anything is measured, as it is in training after the first step.
class Spiller {
 public:
  Spiller(const std::string& directory, int64_t file_bytes, int64_t chunk_bytes, bool is_uneven)
      : half_bytes_(file_bytes / 2),
        store_({.host_bytes = half_bytes_, .stress = {}},
               std::make_unique<SpillFile>(OpenSpillFile(directory), SpillFileOptions{}), &binder_,
               &clock_) {
    first_half_ = MakeHalf(chunk_bytes, is_uneven, Access::kWrite);
    second_half_ = MakeHalf(chunk_bytes, is_uneven, Access::kWrite);
    fillers_ = MakeHalf(chunk_bytes, is_uneven, Access::kRead);
    for (const ChunkAccess& access : second_half_) Fill(access);
    for (const ChunkAccess& access : first_half_) Fill(access);
    WriteBack();  // the first use of the space on disk and of the memory is in no figure
    Fetch();
    TurnOver();
  }

  // Each of these returns seconds, and moves half_bytes() one way, or both ways twice.
  // REQUIRES: called in this order, again and again.
  double WriteBack() {
    return SecondsOf([this] { Use(fillers_); });
  }
  double Fetch() {
    return SecondsOf([this] { Use(first_half_); });
  }
  double TurnOver() {
    return SecondsOf([this] {
      Use(second_half_);
      Use(first_half_);
    });
  }

  int64_t half_bytes() const { return half_bytes_; }

 private:
  using Accesses = std::vector<ChunkAccess>;

  // Uneven chunks all differ in size, as those of a model's chunk groups do.
  Accesses MakeHalf(int64_t chunk_bytes, bool is_uneven, Access access) {
    Accesses accesses;
    int64_t num_bytes = is_uneven ? chunk_bytes * 3 / 4 : chunk_bytes;
    for (int64_t left = half_bytes_; left >= num_bytes; left -= num_bytes) {
      if (is_uneven) num_bytes += kPageAlignment;
      if (left < num_bytes) break;
      const ChunkId chunk = store_.Create(Kind::kParam, num_bytes, Content::kUndefined);
      accesses.push_back({.chunk = chunk, .access = access});
      sizes_[chunk] = num_bytes;
    }
    return accesses;
  }

  // With what the raw loops write as well: some disks treat zeros in a way of their own.
  void Fill(const ChunkAccess& access) {
    const OpLease lease(&store_, {&access, 1}, "benchmark");
    std::memset(store_.data(access.chunk), 0x5a, static_cast<size_t>(sizes_.at(access.chunk)));
  }

  void Use(std::span<const ChunkAccess> all) {
    for (size_t first = 0; first < all.size(); first += kChunksPerOperation) {
      const size_t count = std::min(kChunksPerOperation, all.size() - first);
      const OpLease lease(&store_, all.subspan(first, count), "benchmark");
    }
  }

  const int64_t half_bytes_;
  NullBinder binder_;
  SteadyClock clock_;
  ChunkStore store_;
  std::map<ChunkId, int64_t> sizes_;
  Accesses first_half_, second_half_, fillers_;
};

// One figure, measured once a round.
struct Series {
  std::string name;
  std::vector<double> values;

  double Median() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

  void Print() const {
    constexpr double kGiga = 1e9;
    const auto [min, max] = std::minmax_element(values.begin(), values.end());
    std::printf("  %-36s %8.2f %8.2f %8.2f  GB/s\n", name.c_str(), *min / kGiga, Median() / kGiga,
                *max / kGiga);
  }
};

double BestMedian(const std::vector<Series>& ways) {
  double best = 0.0;
  for (const Series& way : ways) best = std::max(best, way.Median());
  return best;
}

struct Report {
  std::vector<Series> raw_writes, raw_reads;
  Series write{"write-back, by fetching others", {}};
  Series read{"fetch", {}};
  Series both{"write-back and fetch", {}};

  void Print() const {
    const double best_write = BestMedian(raw_writes);
    const double best_read = BestMedian(raw_reads);
    const double best_both = 2.0 / (1.0 / best_write + 1.0 / best_read);
    std::printf("  %-36s %8s %8s %8s\n", "", "min", "median", "max");
    for (const Series& series : raw_writes) series.Print();
    for (const Series& series : raw_reads) series.Print();
    for (const Series* series : {&write, &read, &both}) series->Print();
    std::printf("  ours / best raw: write-back %.2f, fetch %.2f, both %.2f (goal 0.80)\n",
                write.Median() / best_write, read.Median() / best_read, both.Median() / best_both);
  }
};

void MeasureRound(const RawDisk& disk, Spiller* spiller, Report* report) {
  const std::vector<RawDiskResult> results = disk.MeasureAll();
  report->raw_writes.resize(results.size());
  report->raw_reads.resize(results.size());
  for (size_t way = 0; way < results.size(); ++way) {
    const RawDiskResult& result = results[way];
    const std::string name = std::to_string(result.block_bytes / kMiB) + " MiB x " +
                             std::to_string(result.num_threads) + " threads";
    report->raw_writes[way].name = "raw write, " + name;
    report->raw_reads[way].name = "raw read, " + name;
    report->raw_writes[way].values.push_back(result.write_bytes_per_s);
    report->raw_reads[way].values.push_back(result.read_bytes_per_s);
  }
  const auto num_bytes = static_cast<double>(spiller->half_bytes());
  report->write.values.push_back(num_bytes / spiller->WriteBack());
  report->read.values.push_back(num_bytes / spiller->Fetch());
  report->both.values.push_back(4 * num_bytes / spiller->TurnOver());
}

void Run(const std::string& directory, int64_t file_bytes, int num_rounds) {
  utsname system{};
  uname(&system);
  std::printf("spill: %u processors, Linux %s, folder %s, file of %lld MiB, %d rounds\n",
              std::thread::hardware_concurrency(), system.release, directory.c_str(),
              static_cast<long long>(file_bytes / kMiB), num_rounds);
  const RawDisk disk(directory, file_bytes);
  for (const bool is_uneven : {false, true}) {
    for (const int64_t chunk_bytes : {4 * kMiB, 16 * kMiB, 64 * kMiB}) {
      Spiller spiller(directory, file_bytes, chunk_bytes, is_uneven);
      Report report;
      for (int round = 0; round < num_rounds; ++round) MeasureRound(disk, &spiller, &report);
      std::printf("%s of %lld MiB\n", is_uneven ? "uneven chunks" : "chunks",
                  static_cast<long long>(chunk_bytes / kMiB));
      report.Print();
    }
  }
}

}  // namespace
}  // namespace patrickstar::benchmarks

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : ".";
  const int64_t num_mib = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int num_rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  try {
    patrickstar::benchmarks::Run(directory, num_mib << 20, num_rounds);
  } catch (const patrickstar::Error& error) {
    std::fprintf(stderr, "bench_spill: %s\n", error.what());
    return 1;
  }
  return 0;
}
