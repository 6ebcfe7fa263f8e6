// Copies experts from one place in memory to another, on a thread that needs no lock of Python's.
//
// The thread takes the first demand, else the first prefetch, copies one piece of it, and chooses anew. Where the lane
// keeps to a pace, it takes up a piece when the link is free: the link is busy with each piece for as long as the pace
// has it, and a transfer may be used once its last piece is due. A thread that comes late chooses what the link would
// have chosen by then. Times are seconds of the machine's monotonic clock.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#ifdef __linux__
#include <sys/prctl.h>
#endif

using Clock = std::chrono::steady_clock;

enum State : int32_t { PENDING, WHOLE, DROPPED };

// One expert on its way, in memory of who asked for it, who keeps it until it is WHOLE or DROPPED or the lane closed.
struct Transfer {
    const char* from;
    char* into;
    int64_t size, left;
    double asked_at, needed_at, began_at, due;  // needed_at: since when it is a demand
    int32_t is_demand;
    State state;
};

// Turns of waiting for another thread before the processor is offered to others.
static const int SPINS = 1000;
// How late a sharp sleep ends, but for one in ten.
static const double MARGIN = 40e-6;
// How often a thread without work looks for some, and for how long, in seconds.
static const double LOOK_EVERY = 30e-6, PATIENCE = 5e-3;

static double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

static Clock::time_point moment(double seconds) {
    return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

// Have the kernel end this thread's sleeps on time, not up to 50 us later to save power.
static void sharpen_sleeps() {
#ifdef __linux__
    static thread_local const int done = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    (void)done;
#endif
}

static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A mutex is held for less time here than it takes to sleep and be woken.
struct Lock : std::unique_lock<std::mutex> {
    explicit Lock(std::mutex& mutex) : std::unique_lock<std::mutex>(mutex, std::defer_lock) { again(); }

    void again() {
        for (int turns = 0; !try_lock(); turns++)
            turns < SPINS ? relax() : std::this_thread::yield();
    }
};

class Lane {
    std::mutex mutex;
    std::condition_variable work, ended;
    std::deque<Transfer*> demands, prefetches;
    Transfer* under_way = nullptr;
    bool is_asleep = false, is_closed = false;
    double free_at = 0;
    int64_t num_bytes = 0;
    const double bandwidth, latency;  // bytes per second, 0: as fast as it goes; seconds before a transfer's first byte
    const int64_t piece_bytes;
    std::thread thread;

    static bool is_pending(const Transfer& transfer) {
        return __atomic_load_n(&transfer.state, __ATOMIC_ACQUIRE) == PENDING;
    }

    // Once it is told, who asked for `transfer` may let go of it.
    static void tell(Transfer& transfer, State state) { __atomic_store_n(&transfer.state, state, __ATOMIC_RELEASE); }

    std::deque<Transfer*>& queue_of(const Transfer& transfer) { return transfer.is_demand ? demands : prefetches; }

    void leave_queue(Transfer& transfer) {
        std::deque<Transfer*>& queue = queue_of(transfer);
        queue.erase(std::find(queue.begin(), queue.end(), &transfer));
    }

    bool is_filled(int64_t place) const {
        for (auto* queue : {&demands, &prefetches})
            for (const Transfer* transfer : *queue)
                if ((int64_t)transfer->into - (transfer->size - transfer->left) == place) return true;
        return false;
    }

    double seconds_of(const Transfer& transfer, int64_t bytes) const {
        return bandwidth > 0 ? bytes / bandwidth + (transfer.began_at < 0 ? latency : 0) : 0;
    }

    void run() {
        sharpen_sleeps();
        Lock lock(mutex);
        while (!is_closed) {
            if (demands.empty() && prefetches.empty()) {
                await_work(lock);
            } else if (free_at > now()) {
                work.wait_until(lock, moment(free_at));
            } else {
                copy_piece(next(), lock);
            }
        }
    }

    // Look for work now and then, and fall asleep where none comes for long: to wake a thread costs whoever does it 25 us
    // on a virtual machine.
    void await_work(Lock& lock) {
        const double until = now() + PATIENCE;
        while (!is_closed && demands.empty() && prefetches.empty()) {
            if (now() < until) {
                work.wait_for(lock, std::chrono::duration<double>(LOOK_EVERY));
            } else {
                is_asleep = true;
                while (is_asleep) work.wait(lock);
            }
        }
    }

    Transfer& next() const {
        if (demands.empty() || prefetches.empty()) return *(demands.empty() ? prefetches : demands).front();
        Transfer &needed = *demands.front(), &ahead = *prefetches.front();
        return bandwidth > 0 && std::max(free_at, ahead.asked_at) < needed.needed_at ? ahead : needed;
    }

    void copy_piece(Transfer& transfer, Lock& lock) {
        const int64_t bytes = std::min(transfer.left, piece_bytes);
        const double begin = bandwidth > 0 ? std::max(free_at, transfer.asked_at) : now();
        const double seconds = seconds_of(transfer, bytes);
        if (transfer.began_at < 0) transfer.began_at = begin;
        under_way = &transfer;
        lock.unlock();
        std::memcpy(transfer.into, transfer.from, bytes);
        lock.again();
        under_way = nullptr;
        transfer.from += bytes, transfer.into += bytes, transfer.left -= bytes;
        transfer.due = bandwidth > 0 ? free_at = begin + seconds : now();
        if (transfer.state == PENDING) {
            if (transfer.left > 0) return;
            leave_queue(transfer);
            num_bytes += transfer.size;
            tell(transfer, WHOLE);
        }
        ended.notify_all();
    }

    // When `transfer` will be there if nothing more is asked for, by the pace.
    double expected(const Transfer& transfer) const {
        double due = std::max(free_at, transfer.asked_at);
        for (const Transfer* before : demands) {
            due += seconds_of(*before, before->left);
            if (before == &transfer) break;
        }
        return due;
    }

  public:
    Lane(double bandwidth, double latency, int64_t piece_bytes)
        : bandwidth(bandwidth), latency(latency), piece_bytes(piece_bytes), thread([this] { run(); }) {}

    ~Lane() { close(); }

    // Drop what is pending and end the thread, after the piece that is under way. All but `start` may be called still.
    void close() {
        if (!thread.joinable()) return;
        Lock lock(mutex);
        is_closed = true, is_asleep = false;
        for (auto* queue : {&demands, &prefetches}) {
            for (Transfer* transfer : *queue) tell(*transfer, DROPPED);
            queue->clear();
        }
        ended.notify_all();
        lock.unlock();
        work.notify_one();
        thread.join();
    }

    // Queue `count` transfers, in this order: `asked` has the addresses that they are from, then those that they go to,
    // then their bytes. Where one of these places is still being filled none is, and that one's number is given back.
    int64_t start(Transfer* transfers, const int64_t* asked, int64_t count, bool is_demand) {
        const int64_t *from = asked, *into = from + count, *size = into + count;
        Lock lock(mutex);
        for (int64_t i = 0; i < count; i++)
            if (is_filled(into[i])) return i;
        const double at = now();
        for (int64_t i = 0; i < count; i++) {
            transfers[i] = {(const char*)from[i], (char*)into[i], size[i], size[i], at, at, -1, 0, is_demand, PENDING};
            queue_of(transfers[i]).push_back(&transfers[i]);
        }
        const bool must_wake = is_asleep;
        is_asleep = false;
        lock.unlock();
        if (must_wake) work.notify_one();
        return count;
    }

    static bool is_there(const Transfer& transfer) {
        return __atomic_load_n(&transfer.state, __ATOMIC_ACQUIRE) == WHOLE && transfer.due <= now();
    }

    // Whether a demand is there, after `patience` seconds at most. Sleeps until shortly before, then looks at the clock: a
    // sleep is late by a fifth of a short transfer.
    bool wait(const Transfer& transfer, double patience) {
        sharpen_sleeps();
        const double until = now() + patience;
        Lock lock(mutex);
        while (transfer.state == PENDING) {
            const double due = expected(transfer) - MARGIN;
            lock.unlock();
            if (due > now()) std::this_thread::sleep_until(moment(std::min(due, until)));
            while (is_pending(transfer) && now() < std::min(due + 2 * MARGIN, until)) relax();
            lock.again();
            if (now() >= until) break;
            if (transfer.state == PENDING) ended.wait_until(lock, moment(until));
        }
        if (transfer.state != WHOLE) return false;
        const double due = transfer.due;
        lock.unlock();
        if (due - MARGIN > now()) std::this_thread::sleep_until(moment(std::min(due - MARGIN, until)));
        while (now() < std::min(due, until)) relax();
        return now() >= due;
    }

    void promote(Transfer& transfer) {
        Lock lock(mutex);
        if (transfer.state == PENDING) {
            leave_queue(transfer);
            demands.push_back(&transfer);
            transfer.needed_at = now();
        }
        transfer.is_demand = 1;
    }

    // Whether `transfer` was stopped before it was there. Nothing of it is written afterwards.
    bool cancel(Transfer& transfer) {
        Lock lock(mutex);
        if (transfer.state == PENDING) {
            leave_queue(transfer);
            tell(transfer, DROPPED);
            ended.wait(lock, [&] { return under_way != &transfer; });
        } else if (transfer.state == WHOLE && transfer.due > now()) {
            tell(transfer, DROPPED);
        }
        return transfer.state == DROPPED;
    }

    // Of what was brought whole.
    int64_t bytes() {
        Lock lock(mutex);
        return num_bytes;
    }
};

extern "C" {

// None where no thread can be started.
Lane* lane_open(double bandwidth, double latency, int64_t piece_bytes) {
    try {
        return new Lane(bandwidth, latency, piece_bytes);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void lane_close(Lane* lane) { lane->close(); }
void lane_free(Lane* lane) { delete lane; }
int64_t lane_start(Lane* lane, Transfer* transfers, const int64_t* asked, int64_t count, bool is_demand) {
    return lane->start(transfers, asked, count, is_demand);
}
bool lane_is_there(const Transfer* transfer) { return Lane::is_there(*transfer); }
bool lane_wait(Lane* lane, const Transfer* transfer, double patience) { return lane->wait(*transfer, patience); }
void lane_promote(Lane* lane, Transfer* transfer) { lane->promote(*transfer); }
bool lane_cancel(Lane* lane, Transfer* transfer) { return lane->cancel(*transfer); }
int64_t lane_bytes(Lane* lane) { return lane->bytes(); }
}
