package sandbox

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
)

// Environment is the environment of the commands of the sandbox, beyond the image's own.
func (sb *Sandbox) Environment() map[string]string {
	if len(sb.EnvChanges) == 0 {
		return sb.Env
	}
	env := make(map[string]string, len(sb.Env)+len(sb.EnvChanges))
	maps.Copy(env, sb.Env)
	for name, value := range sb.EnvChanges {
		if value == nil {
			delete(env, name)
		} else {
			env[name] = *value
		}
	}
	return env
}

// UpdateEnvironment sets variables for later commands, processes, terminals and sessions, or
// removes those that are nil, and returns the sandbox. It wakes nothing. Errors:
// *InvalidError, ErrDestroyed.
func (m *Manager) UpdateEnvironment(ctx context.Context, id ID, changes map[string]*string) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error { return b.updateEnvironment(ctx, changes) })
}

func (b *liveSandbox) updateEnvironment(ctx context.Context, changes map[string]*string) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.sandbox()
	if before.State == StateDestroyed {
		return fmt.Errorf("sandbox %s: %w", b.id, ErrDestroyed)
	}
	after := before
	after.EnvChanges = make(map[string]*string, len(before.EnvChanges)+len(changes))
	maps.Copy(after.EnvChanges, before.EnvChanges)
	for name, value := range changes {
		if _, own := before.Env[name]; value == nil && !own {
			delete(after.EnvChanges, name)
		} else {
			after.EnvChanges[name] = value
		}
	}
	if err := cmp.Or(validateEnv(after.Environment()), after.validateStoredEnv()); err != nil {
		return err
	}
	err := b.changeSaved(ctx,
		func(sb *Sandbox) { sb.EnvChanges = after.EnvChanges },
		func(sb *Sandbox) { sb.EnvChanges = before.EnvChanges })
	if err != nil {
		return err
	}
	b.emit(Event{Type: EventUpdated})
	b.startSpares(after.Warm) // if it runs; else the next context replaces them
	return nil
}

// environmentSum names the changes to the environment.
func (sb *Sandbox) environmentSum() string {
	if len(sb.EnvChanges) == 0 {
		return ""
	}
	changes, _ := json.Marshal(sb.EnvChanges) // of strings, in order of their names
	return fmt.Sprintf("%x", sha256.Sum256(changes))[:16]
}
