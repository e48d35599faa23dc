package store

import (
	"context"
	"time"
)

const (
	// level0Tables is how many tables may be in Badger's level 0 until they are
	// merged. Each memtable becomes one, as does each Close; every read looks into all
	// of them. It is Badger's default.
	level0Tables = 5
	// mergeRetryMin and mergeRetryMax space the attempts after one has failed, as on a
	// full disk. At 15 tables Badger takes no more of them, and writes wait.
	mergeRetryMin = time.Second
	mergeRetryMax = time.Minute
)

// merger merges Badger's tables when there are many: after Open, and when the writer
// says that one more is being made. Badger's own compactors would look for that
// 20 times a second each, which costs an idle node 0.5 % of a core.
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
			err := s.room.check() // merging writes new tables before it removes the old
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

// noteTable has merger look whether tables are to be merged.
func (s *Badger) noteTable() {
	select {
	case s.tableMade <- struct{}{}:
	default: // it is about to look
	}
}
