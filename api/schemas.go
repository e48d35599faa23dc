package api

import (
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
)

// newSchemas returns a registry that knows the schemas of the types which package
// types declares without huma: durations and enumerations.
func newSchemas() huma.Registry {
	schemas := huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer)
	schemas.RegisterTypeAlias(reflect.TypeFor[types.Duration](), reflect.TypeFor[durationSchema]())
	registerEnum[types.Access](schemas)
	registerEnum[types.Cause](schemas)
	registerEnum[types.ConditionCode](schemas)
	registerEnum[types.DigestAlgorithm](schemas)
	registerEnum[types.Disposition](schemas)
	registerEnum[types.Encoding](schemas)
	registerEnum[types.EventType](schemas)
	registerEnum[types.FileOperation](schemas)
	registerEnum[types.FileType](schemas)
	registerEnum[types.FlowKind](schemas)
	registerEnum[types.GitChange](schemas)
	registerEnum[types.GitConflict](schemas)
	registerEnum[types.GitPhase](schemas)
	registerEnum[types.GitPushStatus](schemas)
	registerEnum[types.HostHeader](schemas)
	registerEnum[types.LogLevel](schemas)
	registerEnum[types.LogStream](schemas)
	registerEnum[types.Operation](schemas)
	registerEnum[types.PresetSource](schemas)
	registerEnum[types.ProcessState](schemas)
	registerEnum[types.Protocol](schemas)
	registerEnum[types.Restart](schemas)
	registerEnum[types.RuleAction](schemas)
	registerEnum[types.RuleDefault](schemas)
	registerEnum[types.SearchStop](schemas)
	registerEnum[types.Stage](schemas)
	registerEnum[types.State](schemas)
	registerEnum[types.StateReason](schemas)
	registerEnum[types.Verdict](schemas)
	registerEnum[types.WakeKind](schemas)
	registerEnum[types.WakeMode](schemas)
	registerEnum[types.WebSocketMode](schemas)
	return schemas
}

// durationSchema is the schema of a types.Duration.
type durationSchema string

// Schema implements huma.SchemaProvider.
func (durationSchema) Schema(huma.Registry) *huma.Schema {
	maxLength := 64
	return &huma.Schema{
		Type:               huma.TypeString,
		Pattern:            `^(0|([0-9]+(\.[0-9]+)?(ms|s|m|h))+)$`,
		PatternDescription: `a duration such as "60s", "5m" or "1h30m"`,
		MaxLength:          &maxLength,
		Examples:           []any{"60s"},
	}
}

// enumeration is an enumeration of package types.
type enumeration[T any] interface {
	~string
	Values() []T
}

func registerEnum[T enumeration[T]](schemas huma.Registry) {
	schemas.RegisterTypeAlias(reflect.TypeFor[T](), reflect.TypeFor[enumSchema[T]]())
}

// enumSchema is the schema of the enumeration T: its values.
type enumSchema[T enumeration[T]] string

// Schema implements huma.SchemaProvider.
func (enumSchema[T]) Schema(huma.Registry) *huma.Schema {
	var zero T
	schema := &huma.Schema{Type: huma.TypeString}
	for _, value := range zero.Values() {
		schema.Enum = append(schema.Enum, string(value))
	}
	return schema
}
