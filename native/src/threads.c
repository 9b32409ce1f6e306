#include "threads.h"

#include <pthread.h>
#include <signal.h>

void lck_threads_run(void *(*body)(void *), void *argument, uint64_t threads) {
  pthread_t others[LCK_THREADS_MOST - 1];
  uint32_t started = 0;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (started < LCK_THREADS_MOST - 1 && started + 1 < threads &&
         pthread_create(&others[started], NULL, body, argument) == 0)
    started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  body(argument);
  for (uint32_t i = 0; i < started; i++)
    pthread_join(others[i], NULL);
}
