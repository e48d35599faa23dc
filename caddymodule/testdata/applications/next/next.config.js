module.exports = { turbopack: { root: process.env.ROOT }, outputFileTracingRoot: process.env.ROOT };
