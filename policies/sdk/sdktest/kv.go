//go:build !wasip1

package sdktest

import (
	"encoding/binary"
	"time"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Limits on the values that a policy can store, as in the node.
const (
	maxKeys  = 1024
	maxKey   = 256
	maxValue = 4 << 10
	maxAll   = 1 << 20
)

// kv holds the values that a policy stores between exchanges.
type kv map[string]entry

type entry struct {
	value []byte
	until time.Time // zero: unlimited
}

func (s kv) get(key string, now time.Time) ([]byte, bool) {
	e, ok := s[key]
	if ok && !e.until.IsZero() && !now.Before(e.until) {
		delete(s, key)
		return nil, false
	}
	return e.value, ok
}

func (s kv) set(key string, value []byte, ttl int64, now time.Time) int32 {
	if len(key) == 0 || len(key) > maxKey || len(value) > maxValue || ttl < 0 {
		return abi.BadArgument
	}
	all := len(value)
	for k := range s {
		if v, ok := s.get(k, now); ok && k != key {
			all += len(k) + len(v)
		}
	}
	if _, ok := s[key]; !ok && len(s) >= maxKeys || all+len(key) > maxAll {
		return abi.LimitHit
	}
	e := entry{value: append([]byte(nil), value...)}
	if ttl > 0 {
		const longest = 10 * 365 * 24 * time.Hour
		e.until = now.Add(time.Duration(min(ttl, longest.Milliseconds())) * time.Millisecond)
	}
	s[key] = e
	return 0
}

func (s kv) add(key string, delta, ttl int64, now time.Time) (int64, int32) {
	value, ok := s.get(key, now)
	if !ok {
		code := s.set(key, binary.LittleEndian.AppendUint64(nil, uint64(delta)), ttl, now)
		return delta, code
	}
	if len(value) != 8 {
		return 0, abi.BadArgument
	}
	old := int64(binary.LittleEndian.Uint64(value))
	sum := old + delta
	if (sum > old) != (delta > 0) && delta != 0 { // overflow
		return 0, abi.LimitHit
	}
	binary.LittleEndian.PutUint64(value, uint64(sum))
	return sum, 0
}
