package sandbox

import (
	"crypto/rand"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/doze-run/doze/runtime/guest"
)

// Limits of a sandbox's description.
const (
	maxEnv        = 256
	maxEnvBytes   = 64 << 10
	maxEnvStored  = 128 << 10 // of Env and EnvChanges, as JSON
	maxLabels     = 64
	maxLabelKey   = 63
	maxLabelValue = 255
	maxLabelBytes = 32 << 10 // of all labels, as JSON
	maxImage      = 512
	maxPorts      = 64
	// A shorter time would put a sandbox to sleep between two requests of one page.
	minIdle = time.Second
	maxIdle = 365 * 24 * time.Hour
	// MaxHold bounds one hold; it can be renewed.
	MaxHold = guest.MaxHold
)

var (
	// A name is a DNS label (RFC 1123), so that it can be the host name.
	namePattern     = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	envPattern      = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	labelKeyPattern = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._/-]*[a-zA-Z0-9])?$`)
	idPattern       = regexp.MustCompile(`^[a-z0-9]{12}$`)
)

// idAlphabet has 32 letters, so that a random byte maps evenly; without l, o
// and the digits that look like them.
const idAlphabet = "abcdefghijkmnpqrstuvwxyz23456789"

// randomText returns n letters of idAlphabet, 5 bits each.
func randomText(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails (crypto/rand)
	for i := range b {
		b[i] = idAlphabet[b[i]&31]
	}
	return string(b)
}

// NewID returns an id of 60 random bits.
func NewID() ID { return ID(randomText(12)) }

// newPortToken returns 100 random bits, which fit a DNS label together with port and id.
func newPortToken() string { return randomText(20) }

// clip shortens input that an error quotes.
func clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

func validateName(name string) error {
	if namePattern.MatchString(name) {
		return nil
	}
	return &InvalidError{Field: "name", Reason: fmt.Sprintf("%q is not a valid name", clip(name)),
		Want: "a name has 1 to 63 of a-z, 0-9 and hyphens, and neither begins nor ends with a hyphen"}
}

func validateEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return &InvalidError{Field: "env", Reason: fmt.Sprintf("has %d variables", len(env)), Want: fmt.Sprintf("at most %d are allowed", maxEnv)}
	}
	total := 0
	for k, v := range env {
		if !envPattern.MatchString(k) {
			return &InvalidError{Field: "env", Reason: fmt.Sprintf("%q is not a valid variable name", clip(k)), Want: "a variable name has letters, digits and underscores and does not begin with a digit"}
		}
		if strings.ContainsRune(v, 0) {
			return &InvalidError{Field: "env", Reason: fmt.Sprintf("the value of %s has a NUL byte", clip(k)), Want: "values are text"}
		}
		total += len(k) + len(v)
	}
	if total > maxEnvBytes {
		return &InvalidError{Field: "env", Reason: fmt.Sprintf("has %d bytes", total), Want: fmt.Sprintf("at most %d are allowed", maxEnvBytes)}
	}
	return nil
}

// validateStoredEnv bounds what the environment takes in the record.
func (sb *Sandbox) validateStoredEnv() error {
	stored := envSize(sb.Env)
	for name, value := range sb.EnvChanges {
		stored += written(name) + 8
		if value != nil {
			stored += written(*value)
		}
	}
	if stored > maxEnvStored {
		return &InvalidError{Field: "env", Reason: fmt.Sprintf("has %d bytes as JSON with the environment that the sandbox was created with", stored),
			Want: fmt.Sprintf("at most %d are stored: put long values into a file", maxEnvStored)}
	}
	return nil
}

func validateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return &InvalidError{Field: "labels", Reason: fmt.Sprintf("there are %d", len(labels)), Want: fmt.Sprintf("at most %d are allowed", maxLabels)}
	}
	if stored := envSize(labels); stored > maxLabelBytes {
		return &InvalidError{Field: "labels", Reason: fmt.Sprintf("have %d bytes as JSON", stored), Want: fmt.Sprintf("at most %d are allowed", maxLabelBytes)}
	}
	for k, v := range labels {
		if len(k) > maxLabelKey || !labelKeyPattern.MatchString(k) {
			return &InvalidError{Field: "labels", Reason: fmt.Sprintf("%q is not a valid key", clip(k)), Want: fmt.Sprintf("a key has 1 to %d letters, digits and . _ / - and begins and ends with a letter or digit", maxLabelKey)}
		}
		if len(v) > maxLabelValue || !utf8.ValidString(v) {
			return &InvalidError{Field: "labels", Reason: fmt.Sprintf("the value of %s is too long or not UTF-8", k), Want: fmt.Sprintf("a value has at most %d bytes of UTF-8", maxLabelValue)}
		}
	}
	return nil
}

func validateIdle(field string, d Duration) error {
	if v := time.Duration(d); v != 0 && (v < minIdle || v > maxIdle) {
		return &InvalidError{Field: field, Reason: fmt.Sprintf("%s is out of range", v), Want: fmt.Sprintf(`use "0s" for never, or %s to %s`, minIdle, maxIdle)}
	}
	return nil
}

func validatePersist(p Persist) error {
	switch p {
	case PersistMemory, PersistDisk, PersistNone:
		return nil
	}
	return &InvalidError{Field: "persist", Reason: fmt.Sprintf("%q is unknown", clip(string(p))), Want: fmt.Sprintf("use %s, %s or %s", PersistMemory, PersistDisk, PersistNone)}
}

// IsID reports whether a text has the form of a sandbox's id.
func IsID(text string) bool { return idPattern.MatchString(text) }
