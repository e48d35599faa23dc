package store

import (
	"context"
	"time"
)

const (
	// level0Tables is how many tables Badger's level 0 may have before they are merged.
	// Each full memtable and each Close adds one, and every read searches all of them.
	// It is Badger's default.
	level0Tables = 5
	// mergeRetryMin and mergeRetryMax bound the pause after a failed attempt, as on a
	// full disk. At 15 tables Badger adds no more of them, and writes wait.
	mergeRetryMin = time.Second
	mergeRetryMax = time.Minute
)

// merger merges Badger's tables when there are many: after Open, and when the writer
// notifies it of a new one. Badger's own compactors would each poll for that 20 times a
// second, which costs an idle node 0.5 % of a core.
func (s *Badger) merger(ctx context.Context) {
	defer close(s.merged)
	for {
		select {
		case <-s.tableMade:
		case <-ctx.Done():
			return
		}
		pause := mergeRetryMin
		for ctx.Err() == nil && s.db.Levels()[0].NumTables > level0Tables {
			err := s.reserve.check() // merging writes new tables before it removes the old ones
			if err == nil {
				err = s.db.Flatten(1)
			}
			if err == nil {
				continue
			}
			s.log.Warn("failed to merge the store's tables, trying again", "error", err, "retry_in", pause)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			pause = min(2*pause, mergeRetryMax)
		}
	}
}

// noteTable makes the merger check the number of tables.
func (s *Badger) noteTable() {
	select {
	case s.tableMade <- struct{}{}:
	default: // it is about to check
	}
}
