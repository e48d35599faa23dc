package sdk

import (
	"cmp"
	"encoding/binary"
	"time"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// All exchanges of one owner with policies of this name share the values of KVGet, KVSet
// and KVAdd. The node stores them within about a second, so they survive its restart; if
// it is killed, the latest changes are lost. The limits are 1,024 keys of at most 256
// bytes, values of 4 KiB, and 1 MiB in all; all policies of an owner store at most 16 MiB. Calls
// that would exceed a limit return ErrLimit.

// KVGet returns the value of key, or false if there is none.
func KVGet(key string) ([]byte, bool, error) {
	n, err := fetchOf("kv_get", key, func(buf []byte) int32 { return abi.Node().KVGet(key, buf) })
	if e, ok := err.(*HostError); ok && e.Err == ErrNotFound {
		return nil, false, nil
	}
	return append([]byte(nil), n...), err == nil, err
}

// KVSet stores value under key for ttl. If ttl is 0, the value is stored until it is
// replaced or the policy is deleted.
func KVSet(key string, value []byte, ttl time.Duration) error {
	if code := abi.Node().KVSet(key, value, milliseconds(ttl)); code < 0 {
		return failure("kv_set", key, code)
	}
	return nil
}

// KVAdd adds delta to the counter key, atomically for all instances, and returns its new
// value. A missing counter starts at 0 and expires after ttl. If ttl is 0, it is stored
// until it is replaced or the policy is deleted.
func KVAdd(key string, delta int64, ttl time.Duration) (int64, error) {
	var sum [8]byte
	if code := abi.Node().KVAdd(key, delta, milliseconds(ttl), &sum); code < 0 {
		return 0, failure("kv_add", key, code)
	}
	return int64(binary.LittleEndian.Uint64(sum[:])), nil
}

// milliseconds returns d in milliseconds, rounded away from zero: a short duration must not
// become 0, which means unlimited.
func milliseconds(d time.Duration) int64 {
	return d.Milliseconds() + int64(cmp.Compare(d%time.Millisecond, 0))
}
