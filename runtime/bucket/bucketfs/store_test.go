package bucketfs

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/testkit"
)

func TestTimeoutOfARequestBeginsWithItsSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := make(slots, 1)
		testkit.NoError(t, "acquire", s.acquire(t.Context()))
		time.AfterFunc(time.Hour, s.releaseSlot)
		testkit.NoError(t, "request", s.do(t.Context(), time.Minute, func(ctx context.Context) error { return ctx.Err() }))
		err := s.do(t.Context(), time.Minute, func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		testkit.ErrorIs(t, "slow request", err, context.DeadlineExceeded)
	})
}

func TestInterruptEndsTheWaitForASlot(t *testing.T) {
	s := make(slots, 1)
	testkit.NoError(t, "acquire", s.acquire(t.Context()))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errInterrupted)
	err := s.do(ctx, time.Minute, func(context.Context) error { return nil })
	testkit.ErrorIs(t, "request", err, errInterrupted)
	s.releaseSlot()
	testkit.NoError(t, "request", s.do(t.Context(), time.Minute, func(context.Context) error { return nil }))
}
