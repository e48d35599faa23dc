// Model-budget bounds each sandbox's requests to a model's API in a span of time.
package main

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// Name of the budget. Rules with the same name share it; without one each
	// host has its own.
	Name string `json:"name"`
	// Window is such as 24h. It begins with the first request, and the next one
	// with the first after its end.
	Window string `json:"window"`
	// Requests and RequestBytes in a window; 0 is unlimited.
	Requests     int64 `json:"requests"`
	RequestBytes int64 `json:"request_bytes"`
	// Methods that count: all but GET, HEAD and OPTIONS unless given.
	Methods []string `json:"methods"`
}

func init() { sdk.Serve(build) }

func main() {}

const (
	minWindow = time.Second
	maxWindow = 366 * 24 * time.Hour
	maxName   = 100 // bytes: with the sandbox's id it has to fit into a key of 256
	// maxLimit prevents sums of concurrent counts from overflowing.
	maxLimit = 1 << 50
)

func build(c config) (sdk.Policy, error) {
	window, err := time.ParseDuration(c.Window)
	switch {
	case err != nil || window < minWindow || window > maxWindow:
		return sdk.Policy{}, errors.New(`"window" is a span from 1s to 8784h, such as "24h"`)
	case c.Requests < 0 || c.RequestBytes < 0 || c.Requests|c.RequestBytes == 0:
		return sdk.Policy{}, errors.New(`"requests" or "request_bytes" is the limit, above 0`)
	case max(c.Requests, c.RequestBytes) > maxLimit:
		return sdk.Policy{}, errors.New(`"requests" and "request_bytes" are at most ` + strconv.FormatInt(maxLimit, 10))
	case len(c.Name) > maxName:
		return sdk.Policy{}, errors.New(`"name" is too long`)
	}
	b := &budget{config: c, window: window}
	return sdk.Policy{Request: b.request}, nil
}

type budget struct {
	config
	window time.Duration
}

func (b *budget) request(r *sdk.Request) error {
	if r.Upgrades() {
		return sdk.Deny("budget: what is sent after a change of protocol cannot be counted")
	}
	if !b.counts(r.Method()) {
		return nil
	}
	sandbox, err := sdk.CurrentSandbox()
	if err != nil {
		return err
	}
	name := b.Name
	if name == "" {
		if name, err = sdk.Host(); err != nil {
			return err
		}
	}
	requests, bytes := sandbox.ID+" requests "+name, sandbox.ID+" bytes "+name
	if b.Requests > 0 {
		if err := b.spend(requests, 1, b.Requests, "requests"); err != nil {
			return err
		}
	}
	if b.RequestBytes == 0 {
		return nil
	}
	size, err := sizeOf(r)
	if err != nil {
		return err
	}
	err = b.spend(bytes, size, b.RequestBytes, "bytes sent")
	if err != nil && b.Requests > 0 {
		return cmp.Or(b.refund(requests, 1), err)
	}
	return err
}

func (b *budget) counts(method string) bool {
	if len(b.Methods) == 0 {
		return method != "GET" && method != "HEAD" && method != "OPTIONS"
	}
	return slices.ContainsFunc(b.Methods, func(m string) bool { return strings.EqualFold(m, method) }) // as lenient servers do
}

// spend spends amount of limit, or denies the request. It adds the amount before it compares
// the sum, so that concurrent requests cannot all spend what is left.
func (b *budget) spend(key string, amount, limit int64, what string) error {
	added := min(amount, limit+1) // the client declares the length of its body, which can be anything
	spent, err := sdk.KVAdd(key, added, b.window)
	if err != nil {
		return err // the limit of counters is reached: refused rather than not counted
	}
	if spent <= limit {
		return nil
	}
	// Refused requests do not count, else a large request would use up the rest of the
	// budget.
	if err := b.refund(key, added); err != nil {
		return err
	}
	return sdk.Deny("budget: " + strconv.FormatInt(spent-added, 10) + " of " + strconv.FormatInt(limit, 10) + " " + what +
		" in " + b.Window + " are used, and this request needs " + strconv.FormatInt(amount, 10))
}

// refund subtracts amount from what was spent.
func (b *budget) refund(key string, amount int64) error {
	left, err := sdk.KVAdd(key, -amount, b.window)
	if err == nil && left < 0 { // the window has ended since
		_, err = sdk.KVAdd(key, amount, b.window)
	}
	return err
}

// sizeOf returns the length of the body. A body without a declared length is buffered.
func sizeOf(r *sdk.Request) (int64, error) {
	if length := r.Header.Get("Content-Length"); length != "" {
		size, err := strconv.ParseInt(length, 10, 64)
		if err != nil || size < 0 { // which would be a refund
			return 0, sdk.Deny("budget: invalid Content-Length")
		}
		return size, nil
	}
	if err := sdk.Enable(sdk.BufferRequest); err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, &r.Body)
}
