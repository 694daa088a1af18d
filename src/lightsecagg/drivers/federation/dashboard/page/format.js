// Numbers and moments as people read them.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count.toLocaleString("en", { maximumFractionDigits: count < 10 && unit ? 1 : 0 })} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function figure(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

export function moment(stamp) {
  if (!stamp) return "–";
  const date = new Date(stamp * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time.slice(0, 5)}`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
