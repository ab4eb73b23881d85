// Threads that help with one request at a time. A request's work comes in shares that any thread may do; whoever asks does
// shares, too, and nobody waits for a helper that has not begun.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace wheel {

class Workers {
 public:
  explicit Workers(unsigned helpers) {
    for (unsigned i = 0; i < helpers; ++i) threads_.emplace_back([this] { serve(); });
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      end_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // Calls work() in this thread and in up to `helpers` others at once; returns when all calls have returned. `work` takes
  // its shares itself and does not throw.
  void run(unsigned helpers, const std::function<void()>& work) {
    auto job = std::make_shared<Job>();
    job->work = &work;
    job->wanted = helpers;
    if (helpers) {
      std::lock_guard<std::mutex> hold(mutex_);
      jobs_.push_back(job);
    }
    for (unsigned i = 0; i < helpers; ++i) wake_.notify_one();
    work();
    if (!helpers) return;
    std::unique_lock<std::mutex> hold(mutex_);
    job->wanted = 0;
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
    done_.wait(hold, [&] { return job->running == 0; });
  }

  // The same ones for all tables of this process that want as many.
  static std::shared_ptr<Workers> shared(unsigned helpers) {
    static std::mutex mutex;
    static std::map<unsigned, std::weak_ptr<Workers>> known;
    std::lock_guard<std::mutex> hold(mutex);
    std::shared_ptr<Workers> found = known[helpers].lock();
    if (!found) known[helpers] = found = std::make_shared<Workers>(helpers);
    return found;
  }

  unsigned size() const { return unsigned(threads_.size()); }

 private:
  struct Job {
    const std::function<void()>* work = nullptr;
    unsigned wanted = 0, running = 0;
  };

  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      wake_.wait(hold, [&] { return end_ || !jobs_.empty(); });
      if (end_) return;
      const std::shared_ptr<Job> job = jobs_.front();
      if (--job->wanted == 0) jobs_.erase(jobs_.begin());
      ++job->running;
      hold.unlock();
      (*job->work)();
      hold.lock();
      if (--job->running == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::vector<std::thread> threads_;
  bool end_ = false;
};

}  // namespace wheel
