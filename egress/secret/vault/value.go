package vault

import (
	"fmt"
	"log/slog"
)

// Value is a secret with its bytes. However it is formatted, logged or encoded, it
// shows its name only; the caller that takes Bytes takes the responsibility.
type Value struct {
	Name  string
	Bytes []byte
}

func (v Value) redacted() string { return "[secret " + v.Name + "]" }

// Format implements fmt.Formatter for all verbs.
func (v Value) Format(f fmt.State, _ rune) { f.Write([]byte(v.redacted())) }

// LogValue implements slog.LogValuer.
func (v Value) LogValue() slog.Value { return slog.StringValue(v.redacted()) }

// MarshalText implements encoding.TextMarshaler, and so JSON's.
func (v Value) MarshalText() ([]byte, error) { return []byte(v.redacted()), nil }

// Format keeps the value of an entry out of whatever formats one.
func (e *entry) Format(f fmt.State, _ rune) { f.Write([]byte("[secret " + e.Name + "]")) }
