package policy

import (
	"cmp"
	"encoding/binary"
	"errors"
	"time"

	"github.com/tetratelabs/wazero/api"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/problem"
)

// coded are the errors that functions of doze_egress_v1 return: -1 for the first, -2 for
// the second, and so on.
var coded = []error{secret.ErrUnknown, secret.ErrNotAllowed, secret.ErrBadArgument, secret.ErrLimit}

// Limits on the data that a policy passes to be signed or encoded.
const (
	maxSecretName = 256
	maxEncode     = 64 << 10
	maxSign       = 64 << 10
	maxParts      = 16
	// maxSigns bounds the signatures per request: an RSA signature takes up to 0.1 s, and
	// cannot be interrupted.
	maxSigns = 4
)

// egressFunctions are the module doze_egress_v1.
var egressFunctions = []function{
	secretFunction("secret_ref", 4, func(c *call, s []uint64) ([]byte, error) {
		return c.secretRef(c.string(s[0], s[1], maxSecretName))
	}),
	secretFunction("encode_ref", 5, func(c *call, s []uint64) ([]byte, error) {
		c.tick()
		return c.encode(int32(s[0]), c.string(s[1], s[2], maxEncode))
	}),
	secretFunction("hmac_sha256", 8, func(c *call, s []uint64) ([]byte, error) {
		c.tick()
		return c.hmac(c.string(s[0], s[1], maxSecretName), c.string(s[2], s[3], maxSecretName), c.bytes(s[4], s[5]))
	}),
	secretFunction("sign", 7, func(c *call, s []uint64) ([]byte, error) {
		return c.sign(c.string(s[0], s[1], maxSecretName), int32(s[2]), c.bytes(s[3], s[4]))
	}),
	textFunction("sandbox", func(c *call) []byte { return c.chain.sandbox() }),
	textFunction("host", func(c *call) string { return c.chain.Host }),
	{"deny", params(2), nil, func(c *call, s []uint64) { c.deny(c.bytes(s[0], s[1])) }},
	{"audit_note", params(2), nil, func(c *call, s []uint64) { c.note(c.bytes(s[0], s[1])) }},
	{"now", nil, []api.ValueType{i64}, func(c *call, s []uint64) { s[0] = uint64(c.instance.policy.host.config.Now().UnixNano()) }},
	{"kv_get", params(4), params(1), func(c *call, s []uint64) {
		key := c.string(s[0], s[1], maxKey)
		s[0] = c.stored(func(k *space, now time.Time) (int64, error) {
			v, ok := k.get(key, now)
			if !ok {
				return 0, secret.ErrUnknown
			}
			return int64(write(c, v, s[2], s[3])), nil
		})
	}},
	{"kv_set", []api.ValueType{i32, i32, i32, i32, i64}, params(1), func(c *call, s []uint64) {
		key, value := c.string(s[0], s[1], maxKey), c.bytes(s[2], s[3])
		s[0] = c.stored(func(k *space, now time.Time) (int64, error) { return 0, k.set(key, value, ttl(s[4]), now) })
	}},
	{"kv_add", []api.ValueType{i32, i32, i64, i64, i32}, params(1), func(c *call, s []uint64) {
		key, out := c.string(s[0], s[1], maxKey), c.bytes(s[4], 8)
		s[0] = c.stored(func(k *space, now time.Time) (int64, error) {
			sum, err := k.add(key, int64(s[2]), ttl(s[3]), now)
			if err == nil {
				binary.LittleEndian.PutUint64(out, uint64(sum))
			}
			return 0, err
		})
	}},
}

// ttl returns ms milliseconds, but at most ten years, and at least -1 ms, which is invalid.
func ttl(ms uint64) time.Duration {
	const longest = 10 * 365 * 24 * time.Hour
	return time.Duration(max(-1, min(int64(ms), longest.Milliseconds()))) * time.Millisecond
}

// resultOf returns the result for an error. Errors without a code end the guest: it must
// not go on as if it had the secret.
func resultOf(err error) uint64 {
	for i, known := range coded {
		if errors.Is(err, known) {
			return uint64(uint32(-1 - i))
		}
	}
	panic(&failure{err.Error(), problem.SecretNotAllowed})
}

// secretFunction returns a function that uses secrets, before the request is sent. Its
// last two parameters are the buffer for the result.
func secretFunction(name string, n int, use func(*call, []uint64) ([]byte, error)) function {
	return function{name, params(n), params(1), func(c *call, s []uint64) {
		if c.phase != beforeNext {
			s[0] = resultOf(secret.ErrNotAllowed)
			return
		}
		v, err := use(c, s)
		if err != nil {
			s[0] = resultOf(err)
			return
		}
		s[0] = write(c, v, s[n-2], s[n-1])
	}}
}

func (c *call) secretRef(name string) ([]byte, error) {
	if name == "" || len(name) > maxSecretName {
		return nil, secret.ErrBadArgument
	}
	ref, err := c.secrets.Reference(name)
	return []byte(ref), err
}

func (c *call) encode(encoding int32, text string) ([]byte, error) {
	if encoding < 0 || encoding > 3 || len(text) > maxEncode {
		return nil, secret.ErrBadArgument
	}
	ref, err := c.secrets.Encode(encoding, text)
	return []byte(ref), err
}

// hmac computes an HMAC over the parts in list. Each part is its length, 4 bytes
// little-endian, and as many bytes.
func (c *call) hmac(name, prefix string, list []byte) ([]byte, error) {
	if name == "" || len(name) > maxSecretName || len(prefix) > maxSecretName || len(list) > maxSign {
		return nil, secret.ErrBadArgument
	}
	var parts [][]byte
	for len(list) > 0 {
		if len(list) < 4 || uint64(binary.LittleEndian.Uint32(list)) > uint64(len(list)-4) || len(parts) == maxParts {
			return nil, secret.ErrBadArgument
		}
		n := binary.LittleEndian.Uint32(list)
		parts = append(parts, list[4:4+n])
		list = list[4+n:]
	}
	if len(parts) == 0 {
		return nil, secret.ErrBadArgument
	}
	return c.secrets.HMAC(name, prefix, parts)
}

func (c *call) sign(name string, algorithm int32, data []byte) ([]byte, error) {
	if name == "" || len(name) > maxSecretName || len(data) > maxSign || algorithm < 1 || algorithm > 3 {
		return nil, secret.ErrBadArgument
	}
	if c.signs++; c.signs > maxSigns {
		return nil, secret.ErrLimit
	}
	return c.secrets.Sign(name, algorithm, data)
}

// deny denies the exchange. Only the first reason counts.
func (c *call) deny(reason []byte) {
	c.inExchange()
	if c.denied != nil {
		return
	}
	text := cmp.Or(printable(string(reason[:min(len(reason), 2*maxReason)]), maxReason), "denied by a policy")
	c.denied = &Denial{Policy: c.instance.policy.name, Reason: text, Code: problem.PolicyDenied}
}

// note adds a note for the audit log. Notes beyond maxNotes are dropped.
func (c *call) note(text []byte) {
	c.inExchange()
	if len(c.chain.Notes) < maxNotes {
		c.chain.Notes = append(c.chain.Notes, printable(string(text[:min(len(text), 2*maxNote)]), maxNote))
	}
}

// stored runs f on the values that the policy has stored in this exchange's namespace.
func (c *call) stored(f func(*space, time.Time) (int64, error)) (result uint64) {
	c.inExchange()
	p := c.instance.policy
	now := p.host.config.Now()
	if !p.host.kv.use(spaceName(p.name, c.namespace), now, func(s *space) {
		if p.forgotten.Load() { // checked under the lock: the space may be newer than Forget
			s = &space{entries: map[string]entry{}}
		}
		n, err := f(s, now)
		if err != nil {
			result = resultOf(err)
			return
		}
		result = uint64(n)
	}) {
		return resultOf(secret.ErrLimit)
	}
	return result
}
