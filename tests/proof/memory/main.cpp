// Runs the litmus programs that are linked in.
#include <sys/mman.h>

#include <chrono>
#include <cstdio>

#include "machine.hpp"

using namespace proof;
using namespace proof::machine;

namespace {

void print_path() {
  for (std::size_t i = 0; i < std::min(depth + 1, path.size()); ++i) {
    const Op& op = path[i].op;
    if (op.kind == Kind::kPlain && op.site == nullptr) continue;
    std::printf("  thread %d: %-12s %-8s byte %-8ld value %-6llx of %llx  @%p\n", path[i].thread,
                kKinds[static_cast<int>(op.kind)], kOrders[op.order],
                op.address == 0 ? 0L : static_cast<long>(op.address - reinterpret_cast<Word>(memory)),
                static_cast<unsigned long long>(op.writes() && op.kind == Kind::kStore ? op.operand : op.result),
                static_cast<unsigned long long>(op.operand), op.site);
  }
}

int order_named(const std::string& name) {
  for (int order = 0; order < 6; ++order) {
    if (name == kOrders[order]) return order;
  }
  std::exit(2);
}

}  // namespace

// [--sites] [--weaken ADDRESS=ORDER]... [--weaken-failure ADDRESS=ORDER]... [NAME]...
int main(int count, char** arguments) {
  memory = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  cells = static_cast<Cell*>(mmap(nullptr, kMemory / 8 * sizeof(Cell), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  heap = static_cast<char*>(std::malloc(kHeap));
  bool lists_sites = false;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> names;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--full") {
      is_full = true;
    } else if (word == "--sites") {
      lists_sites = true;
    } else if (word == "--weaken" || word == "--weaken-failure") {
      const std::string what = arguments[++i];
      const auto equals = what.find('=');
      Weaker& weaker = weakened[reinterpret_cast<const void*>(std::stoul(what.substr(0, equals), nullptr, 16))];
      (word == "--weaken" ? weaker.order : weaker.fail_order) = order_named(what.substr(equals + 1));
    } else {
      names.push_back(word);
    }
  }
  for (const auto& [name, define] : litmuses()) {
    const auto is_part = [&text = name](const std::string& part) { return text.find(part) != std::string::npos; };
    if (!names.empty() && std::none_of(names.begin(), names.end(), is_part)) continue;
    const auto start = std::chrono::system_clock::now();
    std::memset(memory, 0, used);
    used = 64;
    undo.clear();
    Program defined;
    try {
      define(defined);
      if (defined.is_large && !is_full) continue;
      if (defined.threads.empty()) continue;  // it has explored what it wants
      const Explored found = explore(defined);
      const std::chrono::duration<double> seconds = std::chrono::system_clock::now() - start;
      std::printf("%s: %ld executions, %ld pruned, up to %d steps, %.2f s\n", name.c_str(), found.executions,
                  found.pruned, found.steps, seconds.count());
    } catch (const std::string& what) {
      std::printf("%s: FAILED: %s\n", name.c_str(), what.c_str());
      print_path();
      return 1;
    }
  }
  for (const auto& [site, op] : sites) {
    if (!lists_sites) break;
    std::printf("site %p %s %s %s\n", site, kKinds[static_cast<int>(op.kind)], kOrders[op.order],
                kOrders[op.fail_order]);
  }
  return 0;
}
