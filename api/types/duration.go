package types

import (
	"fmt"
	"strconv"
	"time"
)

// Duration is text in the API: written in seconds, such as "60s", and read in any
// form that time.ParseDuration accepts, such as "1h30m". It is not negative.
type Duration time.Duration

// String returns the duration as time.Duration does, such as "1h30m0s".
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(strconv.FormatFloat(time.Duration(d).Seconds(), 'f', -1, 64) + "s"), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil || v < 0 {
		return fmt.Errorf(`invalid duration %.80q; write it like "60s", "5m" or "1h30m"`, text)
	}
	*d = Duration(v)
	return nil
}
